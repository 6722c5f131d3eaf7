"""Moves blocks of an array through registers: copies and transposes."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mpipar.ops.kernels.compile import part

_LINE = 64


@intrinsic
def _turn_square(typing, like, source, row, target, step):  # noqa: ANN001, ANN202
    """Transposes 16 × 16 float32 or 8 × 8 float64, the type of `like`, in registers.

    source, target   addresses, whose lines are `row` and `step` bytes apart
    """
    lanes = 8 * _LINE // like.bitwidth

    def generate(context, builder, signature, args):  # noqa: ANN001, ANN202
        _, source, row, target, step = args
        vector = ir.VectorType(context.get_value_type(like), lanes)

        def line(start: ir.Value, distance: ir.Value, i: int) -> ir.Value:
            place = builder.add(start, builder.mul(distance, ir.IntType(64)(i)))
            return builder.inttoptr(place, vector.as_pointer())

        align = like.bitwidth // 8
        lines = [builder.load(line(source, row, i), align=align) for i in range(lanes)]
        # Swap the off-diagonal halves of squares of 2, 4, 8, ... lanes
        half = 1
        while half < lanes:
            lines = [
                _mix(builder, lines[i & ~half], lines[i | half], half, bool(i & half))
                for i in range(lanes)
            ]
            half *= 2
        for i, values in enumerate(lines):
            builder.store(values, line(target, step, i), align=align)
        return context.get_dummy_value()

    return types.void(like, *[types.int64] * 4), generate


def _mix(
    builder: ir.IRBuilder, a: ir.Value, b: ir.Value, half: int, lower: bool
) -> ir.Value:
    """The upper or lower line of a pair whose off-diagonal halves change places."""
    lanes = a.type.count
    picks = [
        (lanes if lane & half else 0) + (lane | half if lower else lane & ~half)
        for lane in range(lanes)
    ]
    mask = ir.Constant(ir.VectorType(ir.IntType(32), lanes), picks)
    return builder.shuffle_vector(a, b, mask)


@intrinsic
def copy_row(typing, source, target):  # noqa: ANN001, ANN201
    """Copies two cache lines from one address to another, both divided by 4."""

    def generate(context, builder, signature, args):  # noqa: ANN001, ANN202
        pair = ir.VectorType(ir.IntType(32), 2 * _LINE // 4)
        first, second = (builder.inttoptr(x, pair.as_pointer()) for x in args)
        builder.store(builder.load(first, align=4), second, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@part
def turn(x, out, step):
    """out[j·step + i] = x[i, j].   x (n, m) with contiguous rows, out (m·step,)"""
    (n, m), item = x.shape, x.itemsize
    side = _LINE // item
    rows, columns = n // side * side, m // side * side
    for i in range(0, rows, side):
        for j in range(0, columns, side):
            source = x.ctypes.data + i * x.strides[0] + j * item
            target = out.ctypes.data + (j * step + i) * item
            _turn_square(out[0], source, x.strides[0], target, step * item)
    for i in range(n):
        for j in range(columns if i < rows else 0, m):
            out[j * step + i] = x[i, j]
