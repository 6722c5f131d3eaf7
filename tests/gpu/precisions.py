"""The precisions that kernels are made for."""

import numpy as np

from mpipar.ops.cuda.programs import kernel_names

# Compute type and 16-bit type
PRECISIONS = {
    "fp64": ("float64", None),
    "fp32": ("float32", None),
    "bf16": ("float32", "bf16"),
    "fp16": ("float32", "fp16"),
}
OPERANDS = {"fp64": "float64", "fp32": "float32", "bf16": "uint16", "fp16": "float16"}


def every_name(program: str) -> tuple[str, ...]:
    """The kernels of a program in all precisions."""
    names = []
    for precision, (dtype, _) in PRECISIONS.items():
        types = np.dtype(dtype), np.dtype(OPERANDS[precision])
        names += kernel_names(program, *types)
    return tuple(dict.fromkeys(names))
