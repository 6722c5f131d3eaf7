"""Runs a worker's steps when it is told to, so that rivals can take turns.

A worker sleeps until the file turn.K of its folder appears, makes two steps and writes
done.K.RANK with the seconds of the second and its loss: the first one finds cold
caches, as no step of a run does. No rank spins while others work.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path


def serve(folder: Path, rank: int, step: Callable[[], float], warm_up: int = 2) -> None:
    """Makes pairs of steps until the file `stop` appears."""
    for _ in range(warm_up):
        loss = step()
    _tell(folder, f"ready.{rank}", {"loss": loss})
    turn = 0
    while True:
        while not (folder / f"turn.{turn}").exists():
            if (folder / "stop").exists():
                return
            time.sleep(0.002)
        step()
        begin = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - begin
        _tell(folder, f"done.{turn}.{rank}", {"seconds": seconds, "loss": loss})
        turn += 1


def wait_for(folder: Path, name: str, alive: Callable[[], bool]) -> dict:
    """Contents of a file that a worker will write."""
    while not (folder / name).exists():
        if not alive():
            raise RuntimeError(f"worker of {folder.name} died; see {folder}/log")
        time.sleep(0.002)
    return json.loads((folder / name).read_text())


def _tell(folder: Path, name: str, fact: dict) -> None:
    draft = folder / f".{name}"
    draft.write_text(json.dumps(fact))
    draft.rename(folder / name)
