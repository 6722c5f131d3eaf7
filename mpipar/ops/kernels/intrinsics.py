"""What kernels need and Numba does not have: typed constants, a vectorised exp,
16-bit floats, and a call of BLAS through its address.
"""

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_TAYLOR_TERMS = {32: 8, 64: 14}
_EXPONENT = {32: (127, 23), 64: (1023, 52)}
_RANGE = {32: (-87.0, 88.0), 64: (-708.0, 709.0)}
# ln 2 in two parts, of which the first has few bits (Cody & Waite 1980).
_LN2 = {
    32: (0.693359375, -2.1219444005469057e-4),
    64: (0.6931471803691238, 1.9082149292705877e-10),
}


@intrinsic
def real(typing, value, like):  # noqa: ANN001, ANN201
    """`value` in the type of `like`: a bare 0.5 makes float64 of float32 maths."""

    def generate(context, builder, signature, args):  # noqa: ANN001, ANN202
        return context.cast(builder, args[0], value, like)

    return like(value, like), generate


@intrinsic
def exp(typing, x):  # noqa: ANN001, ANN201
    """eˣ to about one unit in the last place, in instructions that vectorise.

    x = n ln 2 + f with |f| ≤ ln 2 / 2; the Taylor polynomial of f times 2ⁿ. Outside of
    the type's range the result is that of its ends; NaN stays NaN.
    """

    def generate(context, builder, signature, args):  # noqa: ANN001, ANN202
        kind = context.get_value_type(x)
        bits = x.bitwidth
        integer = ir.IntType(bits)
        low, high = (ir.Constant(kind, bound) for bound in _RANGE[bits])
        v = args[0]
        v = builder.select(builder.fcmp_ordered("<", v, low), low, v)
        v = builder.select(builder.fcmp_ordered(">", v, high), high, v)
        rint = builder.module.declare_intrinsic("llvm.rint", [kind])
        scaled = builder.fmul(v, ir.Constant(kind, 1.0 / math.log(2.0)))
        n = builder.call(rint, [scaled])
        f = v
        for part in _LN2[bits]:
            f = builder.fma(n, _constant(kind, bits, -part), f)
        terms = range(_TAYLOR_TERMS[bits] - 1, -1, -1)
        factors = [_constant(kind, bits, 1.0 / math.factorial(k)) for k in terms]
        total = factors[0]
        for factor in factors[1:]:
            total = builder.fma(total, f, factor)
        bias, shift = _EXPONENT[bits]
        power = builder.add(builder.fptosi(n, integer), ir.Constant(integer, bias))
        power = builder.shl(power, ir.Constant(integer, shift))
        return builder.fmul(total, builder.bitcast(power, kind))

    return x(x), generate


@intrinsic
def larger(typing, a, b):  # noqa: ANN001, ANN201
    """The larger of two numbers, NaN if either is: unlike max, it vectorises."""

    def generate(context, builder, signature, args):  # noqa: ANN001, ANN202
        kind = context.get_value_type(a)
        pair = ir.FunctionType(kind, [kind, kind])
        maximum = builder.module.declare_intrinsic("llvm.maximum", [kind], pair)
        return builder.call(maximum, args)

    return a(a, a), generate


@intrinsic
def narrow(typing, value, like):  # noqa: ANN001, ANN201
    """`value` as an array of the type of `like` stores it: itself, the bits of bf16
    (uint16) or of fp16 (int16).

    Rounds to the nearest even; a NaN stays a NaN.
    """
    if like == types.int16:

        def truncate(context, builder, signature, args):  # noqa: ANN001, ANN202
            small = builder.fptrunc(args[0], ir.HalfType())
            return builder.bitcast(small, ir.IntType(16))

        return types.int16(types.float32, types.int16), truncate
    if like != types.uint16:
        return value(value, like), lambda c, b, s, args: args[0]

    def generate(context, builder, signature, args):  # noqa: ANN001, ANN202
        word, half = ir.IntType(32), ir.IntType(16)
        bits = builder.bitcast(args[0], word)
        odd = builder.and_(builder.lshr(bits, word(16)), word(1))
        rounded = builder.add(builder.add(bits, word(0x7FFF)), odd)
        nan = builder.fcmp_unordered("uno", args[0], args[0])
        kept = builder.select(nan, builder.or_(bits, word(0x400000)), rounded)
        return builder.trunc(builder.lshr(kept, word(16)), half)

    return types.uint16(types.float32, types.uint16), generate


@intrinsic
def widen(typing, stored, like):  # noqa: ANN001, ANN201
    """The number that an element stands for: itself, or that of 16 bits."""
    if stored == types.int16:

        def extend(context, builder, signature, args):  # noqa: ANN001, ANN202
            small = builder.bitcast(args[0], ir.HalfType())
            return builder.fpext(small, ir.FloatType())

        return types.float32(stored, like), extend
    if stored != types.uint16:
        return stored(stored, like), lambda c, b, s, args: args[0]

    def generate(context, builder, signature, args):  # noqa: ANN001, ANN202
        word = ir.IntType(32)
        bits = builder.shl(builder.zext(args[0], word), word(16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(stored, like), generate


@intrinsic
def gemm(typing, address, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):  # noqa: ANN001, ANN201
    """C = alpha · op(A) op(B) + beta · C by the cblas function at `address`.

    a, b, c    addresses of row-major matrices;  lda, ldb, ldc  their row lengths
    ta, tb     True where the matrix is to be transposed
    """
    integers = [types.int64] * 5
    expected = types.void(
        types.int64, types.boolean, types.boolean, *integers[:3], alpha, *integers[:4],
        alpha, *integers[:2],
    )  # fmt: skip

    def generate(context, builder, signature, args):  # noqa: ANN001, ANN202
        word, long = ir.IntType(32), ir.IntType(64)
        kind = context.get_value_type(alpha)
        sizes = [long] * 3
        function = ir.FunctionType(
            ir.VoidType(),
            [word, word, word, *sizes, kind, long, long, long, long, kind, long, long],
        )
        call = builder.inttoptr(args[0], function.as_pointer())
        flags = [_transpose(builder, flag) for flag in args[1:3]]
        builder.call(call, [word(101), *flags, *args[3:]])
        return context.get_dummy_value()

    return expected, generate


def _transpose(builder: ir.IRBuilder, flag: ir.Value) -> ir.Value:
    """CblasTrans or CblasNoTrans."""
    word = ir.IntType(32)
    return builder.select(builder.trunc(flag, ir.IntType(1)), word(112), word(111))


def _constant(kind: ir.Type, bits: int, value: float) -> ir.Constant:
    """A constant rounded to the type, as LLVM demands of float32 constants."""
    return ir.Constant(kind, float(np.float32(value)) if bits == 32 else value)
