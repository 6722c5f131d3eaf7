"""Where the time of a training step goes on the device, by mpipar bench step."""

import json
import subprocess
from typing import Any

from gpu.run.record import Records, Setting
from gpu.run.speed import RACES

SMALL = ("train.global_batch=2", "model.context=16", "model.vocab=256")


def run(setting: Setting, records: Records) -> None:
    """GPT-2 124M and the part of Llama 3 8B, as their speed is measured."""
    races = [RACES["speed of gpt2-124m"], RACES["speed of llama-8b"]]
    for race in setting.choose(races, races[:1]):
        records.check(race.recipe, lambda r=race: _profile(setting, records, r))


def _profile(setting: Setting, records: Records, race: Any) -> None:
    """Milliseconds of each kind of work. Every call is waited for, so that the sum is
    more than a step takes that is not looked at."""
    file = setting.scratch / f"{race.recipe}-step.json"
    recipe = setting.choose(race.recipe, "tiny")
    words = [*setting.choose(race.words, SMALL), "train.precision=bf16"]
    command = [*setting.command, "bench", "step", recipe, *words, "train.device=cuda"]
    job = subprocess.run(
        [*command, "--steps=3", f"--json={file}"],
        capture_output=True,
        text=True,
        timeout=max(5.0, setting.left),
    )
    print(job.stdout, job.stderr)
    if job.returncode:
        raise RuntimeError(f"ended with {job.returncode}: {job.stderr[-400:]}")
    found = json.loads(file.read_text())
    for kind, spent in found["seconds"].items():
        records.figure(f"{race.recipe} {kind}", 1e3 * spent, "ms")
