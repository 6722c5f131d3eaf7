"""Training steps of whole models, in turns with PyTorch, by mpipar bench peers."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.run.record import Records, Setting, SkippedError

from mpipar.bench.peers import has_module
from mpipar.bench.workload import weight_count
from mpipar.config import Recipe, find_recipe, read_recipe

# Dense bf16 FLOP/s of an H100 or H200, which MFU is a share of
PEAK = 989e12
OURS, RECORDED, RATIO = "mpipar-cuda", "mpipar-cuda-graph", 1.05


@dataclass(frozen=True)
class Race:
    """One model.

    words    changes of the recipe
    torch    the strongest usual form that compiles in time
    tokens   a second that are to be reached; mfu  likewise, of PEAK
    others   contestants besides
    """

    recipe: str
    words: tuple[str, ...]
    torch: str
    tokens: float | None = None
    mfu: float | None = None
    others: tuple[str, ...] = ()

    @property
    def ratio(self) -> float | None:
        """To PyTorch's speed, that is to be reached where anything is."""
        return RATIO if self.tokens or self.mfu else None


# Vocabularies are filled up to whole tiles, as is usual, for both sides.
RACES = {
    "speed of gpt2-124m": Race(
        "gpt2-124m",
        ("train.global_batch=64", "train.micro_batch=0", "model.vocab=50304"),
        "torch-cuda-compile",
        tokens=470e3,
        others=(RECORDED,),
    ),
    "speed of gpt2-1.5b": Race(
        "gpt2-1.5b",
        (
            "train.global_batch=16",
            "train.micro_batch=0",
            "model.vocab=50304",
            "parallel.zero=0",
        ),
        "torch-cuda-blocks",
        tokens=50e3,
    ),
    "speed of llama-8b": Race(
        "llama-8b",
        (
            "train.global_batch=2",
            "train.micro_batch=0",
            "model.layers=4",
            "parallel.tensor=1",
            "parallel.sequence=false",
        ),
        "torch-cuda-compile",
        mfu=50.0,
    ),
}


def run(setting: Setting, records: Records) -> None:
    """Both in turns; one that found no memory beside the other runs again, alone."""
    race = RACES[records.part]
    if setting.dry:
        words = ("train.global_batch=2", "model.vocab=256")
        race = Race("tiny", words, "torch-eager")
    found: dict[str, dict[str, Any]] = {}
    names = (race.torch, OURS, *race.others)

    def together() -> None:
        _compare(race, setting, names, found)

    records.check("in turns with PyTorch", together)
    for name in names:
        if "median_seconds" not in found.get(name, {}) and found:
            label = f"{name} alone"
            records.check(label, lambda n=name: _alone(race, setting, n, found))
    _figures(race, records, found)


def _alone(race: Race, setting: Setting, name: str, found: dict) -> None:
    if not name.startswith("mpipar") and not has_module(sys.executable, "torch"):
        raise SkippedError("torch is not installed")
    _compare(race, setting, (name,), found)


def _compare(
    race: Race,
    setting: Setting,
    names: Sequence[str],
    found: dict[str, dict[str, Any]],
) -> None:
    """Adds what each contestant did to `found`, by name.

    Raises RuntimeError where mpipar did not run, or losses show that the work differed.
    """
    path: Path = setting.scratch / f"{race.recipe}-{'-'.join(names)}.json"
    rounds = setting.choose(7, 1)
    options = [f"--peers={','.join(names)}", f"--rounds={rounds}", f"--json={path}"]
    command = [sys.executable, "-m", "mpipar", "bench", "peers", race.recipe]
    command += ["train.device=cuda", *race.words, *options]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           text=True)  # fmt: skip
    try:
        output, _ = job.communicate(timeout=max(5.0, setting.left))
    except subprocess.TimeoutExpired:
        # It ends its workers when it is asked to.
        job.terminate()
        job.communicate(timeout=15)
        raise
    print(output)
    if not path.exists():
        raise RuntimeError(" ".join(output.split())[-500:])
    entries = json.loads(path.read_text())["contestants"]
    found.update({entry["name"]: entry for entry in entries})
    reasons = [found[name]["not_run"] for name in names if "not_run" in found[name]]
    if OURS in names and "not_run" in found[OURS] or len(reasons) == len(names):
        raise RuntimeError("; ".join(reasons))
    if job.returncode:
        raise RuntimeError(f"losses disagree: {output.strip().splitlines()[-1]}")


def _figures(race: Race, records: Records, found: dict[str, dict[str, Any]]) -> None:
    """Tokens a second, MFU, and the ratio."""
    path = find_recipe(race.recipe)
    recipe = read_recipe(path.read_text(), race.words, path.parent, ranks=1)
    flops, rates = flops_per_token(recipe), {}
    for name, entry in found.items():
        if "median_seconds" not in entry:
            continue
        rates[name] = rate = entry["tokens_per_second"]
        own = name == OURS
        facts = {"seconds": entry["seconds"], "losses": entry["losses"]}
        records.figure(
            f"{name} tokens", rate, "tokens/s", race.tokens if own else None, **facts
        )
        mfu = 100 * rate * flops / PEAK
        records.figure(f"{name} MFU", mfu, "%", race.mfu if own else None)
    if OURS in rates and race.torch in rates:
        ratio, least = rates[OURS] / rates[race.torch], race.ratio
        records.figure(f"{OURS} over {race.torch}", ratio, "x", least)


def flops_per_token(recipe: Recipe) -> float:
    """6 N + 6 L C T: N weights of matrix products, L layers, C width, T context, of
    causal attention half of the pairs (as llm.c counts)."""
    m = recipe.model
    lookups = 0 if m.tied else m.vocab * m.width
    products = weight_count(recipe) - lookups
    return 6.0 * products + 6.0 * m.layers * m.width * m.context
