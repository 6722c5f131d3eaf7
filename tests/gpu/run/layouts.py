"""Layouts on one GPU against the serial model on the CPU; messages; devices."""

from collections.abc import Callable
from typing import Any

import numpy as np
from gpu.run.record import Records, Setting
from parity.build import FP32, FP64, compare, make_recipe

from mpipar.comm import raise_together
from mpipar.engine import open_grid
from mpipar.errors import DeviceError

TOLERANCE = {"fp64": FP64, "fp32": FP32}
EXPERTS = ("model.family=llama", "experts.count=4", "experts.active=2")
FAMILIES = {
    "gpt": (),
    "llama": ("model.family=llama", "model.kv_heads=2"),
    "mixtral": EXPERTS,
}
# Layouts by the number of ranks, the most telling first
LAYOUTS = {
    1: {
        "whole": (),
        "2 micro-batches": ("train.micro_batch=12",),
        "selective": ("train.recompute=selective",),
        "full": ("train.recompute=full",),
    },
    2: {
        "dp": (),
        "tp": ("parallel.tensor=2",),
        "tp sequence": ("parallel.tensor=2", "parallel.sequence=true"),
        "pp 1f1b": ("parallel.pipeline=2", "parallel.schedule=1f1b"),
        "cp zigzag": ("parallel.context=2",),
        "zero 1": ("parallel.zero=1",),
        "zero 2": ("parallel.zero=2",),
        "zero 3": ("parallel.zero=3",),
        "cp ulysses": ("parallel.context=2", "parallel.context_method=ulysses"),
        "pp zb-h1": ("parallel.pipeline=2", "parallel.schedule=zb-h1"),
    },
    4: {
        "tp dp zero 3": ("parallel.tensor=2", "parallel.zero=3"),
        "tp pp sequence": (
            "parallel.tensor=2",
            "parallel.pipeline=2",
            "parallel.sequence=true",
        ),
        "cp pp": ("parallel.context=2", "parallel.pipeline=2"),
        "dp zero 2 in groups": ("parallel.zero=2", "parallel.zero_shard=2"),
        "cp ring": ("parallel.context=4", "parallel.context_method=ring"),
    },
}
# What no model with experts can have
RECORDED = {1: {"recorded": ("train.micro_batch=12", "train.graph=true")}}
# What only a model with experts has
SHARED = {
    2: {"ep": ("parallel.expert=2",)},
    4: {
        "ep tp": ("parallel.expert=2", "parallel.tensor=2"),
        "ep zero 3": ("parallel.expert=2", "parallel.zero=3"),
    },
}
SLOW_PASSES, ITEMS, ROUNDS = 40, 16 << 20, 100


def run(setting: Setting, records: Records) -> None:
    """fp64 first: it tells a wrong sum from rounding."""
    ranks = setting.comm.size
    records.check("device", lambda: _device(setting.comm))
    if ranks == 2:
        act = _messages_after_kernels(setting)
        records.check("messages wait for kernels that fill them", act, 0.0)
    for name, words, precision in cases(setting):
        if _time_is_up(setting):
            return
        act = _compare(setting, [*words, f"train.precision={precision}"])
        records.check(f"{name} {precision}", act, TOLERANCE[precision])


def cases(setting: Setting) -> list[tuple[str, tuple[str, ...], str]]:
    """Name, words and precision of every layout of so many ranks."""
    ranks, found = setting.comm.size, []
    for precision in setting.choose(TOLERANCE, ["fp32"]):
        for family, words in FAMILIES.items():
            layouts = LAYOUTS[ranks] | RECORDED.get(ranks, {})
            if family == "mixtral":
                layouts = SHARED.get(ranks, {}) | LAYOUTS[ranks]
            found += [
                (f"{family} {layout}", (*words, *own), precision)
                for layout, own in layouts.items()
            ]
    return setting.choose(found, found[3 :: max(1, len(found) // 3)])


def _compare(setting: Setting, words: list[str]) -> Callable[[], float]:
    """The largest relative error of losses, norms, gradients and weights."""

    def act() -> float:
        recipe = make_recipe(setting.comm.size, "train.device=cuda", *words)
        errors = compare(recipe, setting.comm, steps=setting.choose(3, 1))
        found = [errors.loss, errors.grad_norm]
        found += [*errors.gradients.values(), *errors.weights.values()]
        return float(np.max(found))

    return act


def _time_is_up(setting: Setting) -> bool:
    """The same answer on all ranks."""
    return setting.comm.bcast(setting.left <= 0)


def _device(comm: Any) -> None:
    """Every rank computes on the device of its place in the node, in turn."""
    grid, ops = open_grid(make_recipe(comm.size, "train.device=cuda"), comm)
    with grid:
        cuda = ops.xp.cuda
        device, count = cuda.Device().id, cuda.runtime.getDeviceCount()
        wanted, error = grid.node_rank % count, None
        if device != wanted:
            error = DeviceError(f"device {device}, not {wanted} of {count}")
        raise_together(error, grid.world)


def _messages_after_kernels(setting: Setting) -> Callable[[], float]:
    """Wrong items of sums of arrays that a slow kernel has only begun to fill.

    The array is filled on a stream of its own, where the sum is asked for at once, and
    is filled again as soon as the sum is there.
    """
    rounds, items = setting.choose(ROUNDS, 3), setting.choose(ITEMS, 1 << 10)
    passes = setting.choose(SLOW_PASSES, 3)

    def act() -> float:
        recipe = make_recipe(2, "train.device=cuda", "train.precision=fp32")
        grid, ops = open_grid(recipe, setting.comm)
        wrong = 0
        with grid:
            xp, world = ops.xp, grid.world
            stream = xp.cuda.Stream(non_blocking=True)
            with stream:
                x = xp.zeros(items, xp.float32)
                for number in range(rounds):
                    x[...] = 0.0
                    for _ in range(passes):
                        x += 1.0
                    x += float(number + world.rank)
                    total = world.all_reduce(x)
                    want = 2 * passes + 2 * number + 1
                    wrong += int((total != want).sum())
                    if number % 10 == 9 and _time_is_up(setting):
                        break
            stream.synchronize()
            return float(world.all_reduce(np.array([wrong]))[0])

    return act
