"""Training speed of models/small.toml, fp32, against PyTorch eager on the same cores.

    pip install "mpipar[mpich,bench]"
    python tests/bench/against_torch.py [--rounds 7] [--torch-python PYTHON]

Both are started once, sleep, and make steps in turn; medians and ratios are printed.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from turns import wait_for

HERE = Path(__file__).parent
TOKENS = 16 * 256
PAUSE_S = 0.5


class Rival:
    """A job that makes steps on demand."""

    def __init__(self, name: str, command: list[str], ranks: int, folder: Path) -> None:
        self.name, self.ranks, self.folder = (
            name,
            ranks,
            folder / name.replace(" ", "-"),
        )
        self.folder.mkdir()
        slow = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
        env = {k: v for k, v in os.environ.items() if k not in slow}
        env |= {"PYTHONPATH": str(HERE), "OPENBLAS_NUM_THREADS": "1"}
        self.log = (self.folder / "log").open("w")
        place = [c if c != "FOLDER" else str(self.folder) for c in command]
        self.job = subprocess.Popen(place, env=env, stdout=self.log, stderr=self.log)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def ready(self) -> None:
        """Returns once the warm-up is over."""
        for rank in range(self.ranks):
            wait_for(self.folder, f"ready.{rank}", self._alive)

    def step(self) -> None:
        """One turn; its time is that of the slowest rank."""
        # Threads of the rival before may spin for a while after their step.
        time.sleep(PAUSE_S)
        turn = len(self.seconds)
        (self.folder / f"turn.{turn}").touch()
        facts = [
            wait_for(self.folder, f"done.{turn}.{rank}", self._alive)
            for rank in range(self.ranks)
        ]
        self.seconds.append(max(f["seconds"] for f in facts))
        self.losses.append(facts[0]["loss"])

    def end(self) -> None:
        """Lets the job finish."""
        (self.folder / "stop").touch()
        self.job.wait(60)
        self.log.close()

    def _alive(self) -> bool:
        return self.job.poll() is None


def main() -> None:
    """Runs the rivals in turn and prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--torch-python", default=sys.executable)
    args = parser.parse_args()
    torch = [args.torch_python, str(HERE / "torch_worker.py"), "FOLDER"]
    mpi = [str(Path(sys.executable).with_name("mpiexec")), "-n"]
    worker = [sys.executable, str(HERE / "mpipar_worker.py"), "FOLDER"]
    with tempfile.TemporaryDirectory() as folder:
        rivals = [
            Rival("torch 2 threads", torch, 1, Path(folder)),
            Rival("mpipar dp 2", [*mpi, "2", *worker], 2, Path(folder)),
            Rival(
                "mpipar tp 2",
                [*mpi, "2", *worker, "parallel.tensor=2"],
                2,
                Path(folder),
            ),
        ]
        for rival in rivals:
            rival.ready()
        for _ in range(args.rounds):
            for rival in rivals:
                rival.step()
        for rival in rivals:
            rival.end()
    base = statistics.median(rivals[0].seconds)
    for rival in rivals:
        median = statistics.median(rival.seconds)
        print(
            f"{rival.name:16} {median * 1e3:7.0f} ms  {TOKENS / median:7.0f} tokens/s  "
            f"ratio {base / median:.3f}  loss {rival.losses[0]:.4f} → "
            f"{rival.losses[-1]:.4f}"
        )


if __name__ == "__main__":
    main()
