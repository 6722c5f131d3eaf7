"""The CUDA programs: their text, and which kernels are made of their templates.

A program is `common.cuh` and one `.cu` file. Each precision has its own kernels, made
at their first use: C stands for the compute type, S for the type of operands,
and H for it where it is a 16-bit one.
"""

from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from mpipar.ops.half import is_half

# What NVRTC is told beside the architecture
OPTIONS = ("-std=c++17",)
# C++ name of the type of an array. As everywhere in mpipar, uint16 are bits of bf16.
TYPES = {"float64": "double", "float32": "float", "uint16": "bf16", "float16": "fp16"}
# Both kinds of each array that may be of either type
_EITHER = ("C, C", "C, S")
_WIDTHS = ("H, 64", "H, 96", "H, 128")
# What programs begin with beside what all share
_PARTS = {
    "position": ("philox.cuh",),
    "attention": ("philox.cuh",),
    "flash": ("philox.cuh", "mma.cuh"),
    "rounding": ("philox.cuh",),
}

# kernel -> template arguments, in each program
PROGRAMS: dict[str, dict[str, tuple[str, ...]]] = {
    "elementwise": {
        "cast": ("C, S", "S, C"),
        "add_to": _EITHER,
        "add_rows": _EITHER,
        "gelu_fwd": (
            "C, C, S, true", "C, C, S, false", "S, C, S, true", "S, C, S, false",
        ),
        "gelu_bwd": ("C, S", "S, S"),
        "swiglu_fwd": ("C, C, S", "S, C, S"),
        "swiglu_bwd": (
            "C, C, C, C", "C, C, C, S", "C, S, C, S", "S, C, C, S", "S, S, C, S",
        ),
        "column_sums": ("C, C", "S, C"),
        "add_column_sums": _EITHER,
    },
    "norm": {
        "norm_fwd": (
            "C, S, C, true", "C, S, C, false", "C, S, S, true", "C, S, S, false",
        ),
        "norm_bwd": (
            "C, C, C, true", "C, C, C, false", "C, C, S, true", "C, C, S, false",
            "S, C, C, true", "S, C, C, false", "S, C, S, true", "S, C, S, false",
        ),
    },
    "position": {
        "rope": ("C, C", "S, C"),
        "add_positions": _EITHER,
        "positions_bwd": _EITHER,
        "dropout_factors": ("C",),
        "dropout": ("C",),
    },
    "embedding": {
        "embedding_fwd": ("C, C", "S, C"),
        "count_rows": ("",),
        "sum_counts": ("",),
        "place_rows": ("",),
        "sort_tokens": ("",),
        "embedding_sums": _EITHER,
        "embedding_joins": _EITHER,
    },
    "attention": {
        "attention_fwd": _EITHER,
        "attention_bwd_q": _EITHER,
        "attention_bwd_kv": ("C",),
        "attention_merge": ("C",),
        "key_reach": ("64",),
    },
    "sums": {"sum_rows": ("C, C", "S, S", "S, C")},
    # Of one head width each, and of 16-bit types only
    "flash": {name: _WIDTHS for name in ("flash_fwd", "flash_bwd_q", "flash_bwd_kv")},
    "loss": {
        "xent_fwd": ("C, C", "S, C"),
        "xent_merge": ("C",),
        "xent_bwd": ("C, C, S", "S, C, S"),
        "loss_sum": ("C",),
    },
    "rows": {
        "gather_rows": ("C", "S"),
        "combine_rows": ("C, C", "S, C"),
        "combine_bwd": ("C, C, C, S", "S, C, C, S", "C, S, C, S", "S, S, C, S"),
    },
    # To 16-bit types only
    "rounding": {"round_stochastic": ("H",)},
    "optimizer": {"square_sums": ("C", "S"), "adamw": ("C, C, S", "C, S, S")},
}  # fmt: skip
PROGRAM_OF = {kernel: name for name, made in PROGRAMS.items() for kernel in made}

# (source, names of kernels) -> a module like cupy.RawModule, whose get_function(name)
# is called with (grid, block, arguments, shared_mem=bytes)
Compile = Callable[[str, tuple[str, ...]], Any]


@cache
def source(program: str) -> str:
    """The text of a program."""
    room = files(__package__)
    return "\n".join(
        room.joinpath(file).read_text(encoding="utf-8")
        for file in ("common.cuh", *_PARTS.get(program, ()), f"{program}.cu")
    )


def kernel_name(kernel: str, *arguments: np.dtype | bool | int) -> str:
    """A kernel with its template arguments, as C++ writes it."""
    words = [
        TYPES[x.name] if isinstance(x, np.dtype) else str(x).lower() for x in arguments
    ]
    return f"{kernel}<{', '.join(words)}>" if words else kernel


def kernel_names(
    program: str, dtype: np.dtype, operand: np.dtype, width: int | None = None
) -> tuple[str, ...]:
    """All kernels of a program for one precision, or those of one width of heads."""
    types = {"C": TYPES[dtype.name], "S": TYPES[operand.name]}
    if is_half(operand):
        types["H"] = types["S"]
    names = []
    for kernel, made in PROGRAMS[program].items():
        for words in (text.split(", ") for text in made):
            own = ", ".join(types.get(word, word) for word in words)
            if "H" in words and "H" not in types:
                continue
            if width is None or str(width) in words:
                names.append(f"{kernel}<{own}>" if own else kernel)
    return tuple(dict.fromkeys(names))
