"""The innermost loop of a matrix product: a tile of sums in AVX-512 registers.

Written in assembly, because it fills all 32 registers and reads A through addresses of
the form base + 2 × stride: LLVM's own code for the same loop is a third slower.
"""

import functools
from collections.abc import Iterator

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# What a tile is told, in the order of its block of int64; distances are in bytes.
STEPS, REST, COLUMNS, A, A_ROW, A_STEP, B = range(7)
OUT, OUT_ROW, BIAS, ONTO, ONTO_ROW, AHEAD, AHEAD_STEP, FIELDS = range(7, 15)
# A row of sums takes two registers, and so does a row of B.
LINE, ROW, REGISTERS = 64, 128, 32
# Lines that each round asks for ahead
LINES_AHEAD = 3

_USED = [f"xmm{i}" for i in range(REGISTERS)] + [
    "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15",
    "k1", "k2", "memory", "flags",
]  # fmt: skip


@functools.cache
def has_registers() -> bool:
    """True where the CPU has what a tile needs."""
    features = llvmlite.binding.get_host_cpu_features()
    return all(features.get(name, False) for name in ("avx512f", "bmi2"))


def make_tile(rows: int):  # noqa: ANN201
    """The function (like, block) for so many rows of out = A B + bias + onto.

    like     a number of the type that is multiplied, float32 or float64
    block    address of the fields: A[r, k] lies at A + r A_ROW + k A_STEP, B is packed
             in rows of 128 bytes, of which COLUMNS numbers count; out and onto have
             contiguous rows. BIAS and ONTO may be 0; onto may be out itself.
             The depth is rows × STEPS + REST. Each of the rows + 1 rounds asks memory
             for a row of out, one of onto and three lines AHEAD: all at once would
             hold up B, which comes through the same buffers.
    """

    @intrinsic
    def multiply(typing, like, block):  # noqa: ANN001, ANN202
        text = "\n".join(_code(rows, like.bitwidth))

        def generate(context, builder, signature, args):  # noqa: ANN001, ANN202
            llvmlite.binding.initialize_native_asmparser()
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
            rules = ",".join(["{rdi}", *(f"~{{{name}}}" for name in _USED)])
            builder.asm(kind, text, rules, [args[1]], True)
            return context.get_dummy_value()

        return types.void(like, types.int64), generate

    return multiply


def _code(rows: int, bits: int) -> Iterator[str]:
    """The tile in AT&T syntax; block in rdi, B in rax, A in r8 to r11, out in r13."""
    f = {32: "s", 64: "d"}[bits]
    free = REGISTERS - 2 * rows
    sums = [(f"%zmm{free + 2 * r}", f"%zmm{free + 2 * r + 1}") for r in range(rows)]
    yield from _mask_columns(512 // bits)
    for pair in sums:
        yield from (f"vpxord {total}, {total}, {total}" for total in pair)
    # Every third row of A has an address of its own
    places = ["%r8", "%r9", "%r10", "%r11"][: -(-rows // 3)]
    yield f"movq {_field(A)}, %r8"
    yield f"movq {_field(A_ROW)}, %rcx"
    yield "leaq (%rcx,%rcx,2), %rax"
    for before, place in zip(places, places[1:], strict=False):
        yield f"leaq ({before},%rax), {place}"
    yield f"movq {_field(A_STEP)}, %rdx"
    yield f"movq {_field(B)}, %rax"
    yield f"movq {_field(OUT)}, %r13"
    yield f"movq {_field(ONTO)}, %r14"
    yield from ("testq %r14, %r14", "cmove %r13, %r14")
    yield f"movq {_field(AHEAD)}, %r15"
    yield from (f"movq $${rows + 1}, %rbx", "1:")
    yield from _ask_memory()
    yield f"movq {_field(STEPS)}, %r12"
    yield from ("cmpq $$1, %rbx", f"cmove {_field(REST)}, %r12")
    yield from ("testq %r12, %r12", "je 3f", ".p2align 4", "2:")
    yield from _load_row(f)
    for r, pair in enumerate(sums):
        number = f"%zmm{2 + r % (free - 2)}"
        at = f"({places[r // 3]}{('', ',%rcx', ',%rcx,2')[r % 3]})"
        yield f"vbroadcasts{f} {at}, {number}"
        yield from (f"vfmadd231p{f} %zmm{j}, {number}, {pair[j]}" for j in (0, 1))
    yield from (f"addq %rdx, {place}" for place in places)
    yield from (f"addq $${ROW}, %rax", "decq %r12", "jne 2b")
    yield from ("3:", "decq %rbx", "jne 1b")
    yield from _finish(f, sums)


def _field(number: int) -> str:
    return f"{8 * number}(%rdi)"


def _mask_columns(lanes: int) -> Iterator[str]:
    """k1 and k2 have a bit for each lane whose column there is."""
    yield f"movq {_field(COLUMNS)}, %rcx"
    yield from ("movq $$-1, %rax", "bzhi %rcx, %rax, %rax", "kmovw %eax, %k1")
    yield from (f"shrq $${lanes}, %rax", "kmovw %eax, %k2")


def _ask_memory() -> Iterator[str]:
    for place, step in (("%r13", OUT_ROW), ("%r14", ONTO_ROW)):
        yield from (f"prefetcht0 ({place})", f"prefetcht0 {LINE}({place})")
        yield f"addq {_field(step)}, {place}"
    for _ in range(LINES_AHEAD):
        yield from ("prefetcht0 (%r15)", f"addq {_field(AHEAD_STEP)}, %r15")


def _load_row(f: str) -> Iterator[str]:
    """The columns at rax that there are."""
    for j in (0, 1):
        yield f"vmovup{f} {LINE * j}(%rax), %zmm{j}{{%k{j + 1}}}{{z}}"


def _finish(f: str, sums: list[tuple[str, str]]) -> Iterator[str]:
    """Adds bias and onto where there are any, and stores."""
    yield f"movq {_field(BIAS)}, %rax"
    yield from ("testq %rax, %rax", "je 4f")
    yield from _load_row(f)
    for pair in sums:
        yield from (f"vaddp{f} %zmm{j}, {pair[j]}, {pair[j]}" for j in (0, 1))
    yield "4:"
    yield f"movq {_field(ONTO)}, %rax"
    yield f"movq {_field(ONTO_ROW)}, %rcx"
    yield from ("testq %rax, %rax", "je 5f")
    for pair in sums:
        for j, total in enumerate(pair):
            yield f"vaddp{f} {LINE * j}(%rax), {total}, {total}{{%k{j + 1}}}"
        yield "addq %rcx, %rax"
    yield "5:"
    yield f"movq {_field(OUT)}, %rax"
    yield f"movq {_field(OUT_ROW)}, %rcx"
    for pair in sums:
        for j, total in enumerate(pair):
            yield f"vmovup{f} {total}, {LINE * j}(%rax){{%k{j + 1}}}"
        yield "addq %rcx, %rax"
