"""Runs of mpipar train on the GPU: loss curves of precisions, memory as predicted."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gpu.run.record import Records, Setting

from mpipar.bench.workload import CONSTANT_RATE, Workload
from mpipar.config import find_recipe, read_recipe
from mpipar.grid import serial_grid
from mpipar.ops import make_ops
from mpipar.train.metrics import memory

FIRST = 10  # steps in which rounding has not grown yet
BF16, FP32, COUNTED = 5e-3, 1e-4, 0.03
SMALL = ["train.eval_samples=4", "train.global_batch=4", "model.context=16"]


def run(setting: Setting, records: Records) -> None:
    """Each run is a process of its own, as a user's is."""
    runs = setting.scratch / "runs"

    def train(device: str, precision: str) -> Callable[[], None]:
        return lambda: _train(setting, runs, device, precision)

    for device, precision in (("cpu", "fp32"), ("cuda", "fp32"), ("cuda", "bf16")):
        name = f"{device} {precision}"
        records.check(f"train {name}", train(device, precision))
        if device == "cuda":
            records.check(f"memory {name}", lambda n=name: _counted(runs / n), COUNTED)
    pair = "cuda fp32", "cpu fp32"
    act = _apart(runs, *pair, FIRST)
    records.check("losses of GPU and CPU, the first steps", act, FP32)
    act = _apart(runs, "cuda bf16", "cuda fp32", None)
    records.check("losses of bf16 and fp32, all steps", act, BF16)
    act = _large_memory(setting, records)
    records.check("memory of a larger model", act, COUNTED)


def _train(setting: Setting, runs: Path, device: str, precision: str) -> None:
    """50 steps of a small Llama on Python's own sources."""
    out, steps = runs / f"{device} {precision}", setting.choose(50, 4)
    words = [f"train.steps={steps}", f"train.device={device}"]
    words += [f"train.precision={precision}", "log.progress=none"]
    words += setting.choose([], SMALL)
    command = [*setting.command, "train", "tiny-llama", *words]
    job = subprocess.run(
        [*command, f"--out={out}"], capture_output=True, text=True, timeout=120
    )
    print(job.stdout, job.stderr)
    if job.returncode:
        raise RuntimeError(f"ended with {job.returncode}: {job.stderr[-400:]}")


def _lines(run: Path) -> list[dict]:
    text = (run / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def _apart(runs: Path, own: str, other: str, steps: int | None) -> Callable[[], float]:
    """The largest relative difference of a loss."""

    def act() -> float:
        a, b = (
            np.array([line["loss"] for line in _lines(runs / name)][:steps])
            for name in (own, other)
        )
        return float(np.abs(a / b - 1).max())

    return act


def _counted(run: Path) -> float:
    """The largest relative difference of what was counted from what was predicted."""
    line = _lines(run)[-1]
    return _off(line["memory"], line["memory_predicted"])


def _off(counted: dict[str, int], predicted: dict[str, int]) -> float:
    pairs = [(counted[kind], size) for kind, size in predicted.items()]
    return max(
        abs(own - size) / size if size else float(own > 0) for own, size in pairs
    )


def _large_memory(setting: Setting, records: Records) -> Callable[[], float]:
    """Two steps of GPT-2 124M; what the device holds beside the arrays is told."""

    def act() -> float:
        words = [*CONSTANT_RATE, "train.device=cuda", "train.precision=bf16"]
        words += setting.choose(
            ["train.global_batch=16", "train.micro_batch=16", "model.vocab=50304"],
            ["train.global_batch=2", "train.micro_batch=2", "model.vocab=256"],
        )
        path = find_recipe(setting.choose("gpt2-124m", "tiny"))
        recipe = read_recipe(path.read_text(), words, path.parent, ranks=1)
        ops, grid = make_ops("cuda", "bf16"), serial_grid()
        before = ops.xp.cuda.runtime.memGetInfo()[0]
        work = Workload(recipe, grid, ops)
        for _ in range(2):
            work.step()
        ops.synchronize()
        taken = before - ops.xp.cuda.runtime.memGetInfo()[0]
        counted = {k: n for k, n in memory(work.engine).items() if "rss" not in k}
        predicted = work.engine.predicted_memory()
        records.figure("memory by formula", sum(predicted.values()) / 2**30, "GiB")
        records.figure("memory taken of the device", taken / 2**30, "GiB", **counted)
        return _off(counted, predicted)

    return act
