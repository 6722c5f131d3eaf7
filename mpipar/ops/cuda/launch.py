"""How kernels are launched: how many blocks of how many threads, on which types.

Everything that depends on the device rather than on the maths is decided here.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mpipar.ops.cuda.programs import (
    PROGRAM_OF,
    Compile,
    kernel_name,
    kernel_names,
    source,
)

Array = Any

WARP = 32
THREADS = 256  # of a block that maps items or works on a row
# Widest row that a warp works on alone, in items
WARP_ROW = 1024
# Most threads of a block that works on rows and keeps sums over them, and of all of its
# blocks: as many as the largest devices run at a time
ROW_THREADS, ALL_THREADS = 512, 132 * 2048
# Enough blocks to fill any device; each takes more than one share of the work.
BLOCKS = 4096
# Blocks with a partial sum each: two for each multiprocessor of the largest devices.
SUM_BLOCKS = 264
# Rows that are summed by one block of `column_sums`, at least
CHUNK = 256
# Rows of a block of attention, one a warp; as in attention.cu
ATTENTION_ROWS = 8
# Rows of a block of attention by tensor cores, and of the tiles that it goes through
# forward and backward; as in flash.cu
FLASH_ROWS, FLASH_TILE, FLASH_SHORT = 64, 64, 32
# Bytes of shared memory that a kernel has without asking: 48 KiB, less what it may have
# of a fixed size beside
FREE_SHARED = 32 << 10
# and what a kernel asks for at most that could also do with less
KEPT_SHARED = 96 << 10


class Launcher:
    """The kernels of one precision, compiled at first use.

    compile          makes a module of a program
    dtype, operand   compute type, type of operands
    """

    def __init__(self, compile: Compile, dtype: np.dtype, operand: np.dtype) -> None:
        self.compile, self.dtype, self.operand = compile, dtype, operand
        # Items of the compute type that one access moves; ITEMS in common.cuh
        self.lanes = 16 // dtype.itemsize
        self._modules: dict[tuple, Any] = {}
        self._functions: dict[tuple, Any] = {}

    def over_items(
        self,
        kernel: str,
        types: list,
        size: int,
        *arguments: Any,
        blocks: int = BLOCKS,
    ) -> None:
        """kernel(size, ...), in which threads of some blocks take items in turn."""
        grid = (min(blocks, -(-size // (THREADS * self.lanes))),)
        arguments = (np.int64(size), *arguments)
        self._launch(kernel, types, grid, (THREADS,), arguments)

    def over_rows(
        self, kernel: str, types: list, rows: int, width: int, *arguments: Any
    ) -> None:
        """kernel(rows, width, ...), in which blocks take rows in turn."""
        grid, block = (min(BLOCKS, rows),), (self.threads(width),)
        arguments = (np.int64(rows), width, *arguments)
        self._launch(kernel, types, grid, block, arguments)

    def by_row(
        self,
        kernel: str,
        types: list,
        rows: int,
        width: int,
        *arguments: Any,
        kept: int = 0,
    ) -> None:
        """kernel(width, rows, ...) with a block for each row, or a warp if it is short.

        kept   items of the compute type for a row in shared memory
        """
        block = (WARP, THREADS // WARP) if width <= WARP_ROW else (self.threads(width),)
        grid = -(-rows // (block[1] if len(block) > 1 else 1))
        shared = kept * self.dtype.itemsize * math.prod(block[1:])
        arguments = (width, np.int64(rows), *arguments)
        self._launch(kernel, types, (grid,), block, arguments, shared)

    def by_rows(
        self,
        kernel: str,
        types: list,
        blocks: int,
        rows: int,
        width: int,
        *arguments: Any,
        kept: int,
    ) -> None:
        """kernel(width, rows, ...) in which so many blocks take rows in turn.

        kept   as in `by_row`, of a block
        """
        block = (self.threads(width, ROW_THREADS),)
        arguments, shared = (width, np.int64(rows), *arguments), kept
        shared *= self.dtype.itemsize
        self._launch(kernel, types, (blocks,), block, arguments, shared)

    def blocks_for(self, rows: int, width: int) -> int:
        """Blocks of `by_rows`: all that a large device runs at a time, of some rows."""
        return min(-(-rows // 4), ALL_THREADS // self.threads(width, ROW_THREADS))

    def in_blocks(
        self, kernel: str, types: list, grid: tuple, block: int, *arguments: Any
    ) -> None:
        """kernel(...) in blocks of so many threads."""
        self._launch(kernel, types, grid, (block,), arguments)

    def threads(self, width: int, most: int = THREADS) -> int:
        """Threads of a block that works on a row: whole warps, none idle."""
        return min(most, -(-width // (WARP * self.lanes)) * WARP)

    def by_warps(
        self,
        kernel: str,
        types: list,
        sizes: tuple[int, int, int],
        kept: int,
        *arguments: Any,
    ) -> None:
        """A kernel with a warp for each row of (rows, heads, sequences)."""
        rows, *others = sizes
        grid, block = (-(-rows // ATTENTION_ROWS), *others), (ATTENTION_ROWS * WARP,)
        shared = kept * self.dtype.itemsize
        self._launch(kernel, types, grid, block, arguments, shared)

    def by_tiles(
        self,
        kernel: str,
        types: list,
        sizes: tuple[int, int, int],
        kept: int,
        *arguments: Any,
    ) -> None:
        """A kernel with a block of four warps for each FLASH_ROWS of (rows, heads,
        sequences), and so many 16-bit items in its shared memory."""
        rows, *others = sizes
        grid, shared = (-(-rows // FLASH_ROWS), *others), 2 * kept
        self._launch(kernel, types, grid, (4 * WARP,), arguments, shared)

    def key_reach(self, begin: Array, end: Array, first: Array, last: Array) -> None:
        """Which queries see each FLASH_ROWS keys: first and last of tiles of them.

        Shapes   begin, end (b or 1, s), first, last (b or 1, tiles)
        """
        grid, arguments = first.shape[::-1], (begin.shape[1], begin, end, first, last)
        self._launch("key_reach", [FLASH_ROWS], grid, (THREADS,), arguments)

    def column_sums(self, x: Array, sums: Array, chunk: int) -> None:
        """sums[i] = Σ of the i-th `chunk` rows of x, by blocks of 32 × 8 threads.

        Shapes   x (rows, width), sums (chunks, width)
        """
        rows, width = x.shape
        packs = width % self.lanes == 0 and is_aligned(x, self.lanes)
        columns = self.lanes if packs else 1
        grid = (-(-width // (WARP * columns)), len(sums))
        arguments = np.int64(rows), width, x, sums, np.int64(chunk), columns
        types = [x.dtype, self.dtype]
        self._launch("column_sums", types, grid, (WARP, 8), arguments)

    def add_column_sums(self, parts: Array, grads: list[Array]) -> None:
        """grads[i] += Σ of the rows of parts[i], by blocks of 32 × 32 threads.

        Shapes   parts (grads, rows, width), grads (width,), one or two of one type
        """
        count, rows, width = parts.shape
        grid, types = (-(-width // WARP), count), [self.dtype, grads[0].dtype]
        arguments = rows, width, parts, grads[0], grads[-1]
        self._launch("add_column_sums", types, grid, (WARP, WARP), arguments)

    def _launch(
        self,
        kernel: str,
        types: list,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: tuple,
        shared: int = 0,
    ) -> None:
        if math.prod(grid) == 0:
            return
        key = kernel, *types
        if key not in self._functions:
            self._functions[key] = self._function(kernel, types)
        function = self._functions[key]
        if shared > FREE_SHARED:
            function.max_dynamic_shared_size_bytes = shared
        values = tuple(self._value(a) for a in arguments)
        function(grid, block, values, shared_mem=shared)

    def _function(self, kernel: str, types: list) -> Callable:
        program = PROGRAM_OF[kernel]
        # Kernels of one width of heads are a module of their own.
        width = next((t for t in types if type(t) is int), None)
        if (program, width) not in self._modules:
            names = kernel_names(program, self.dtype, self.operand, width)
            self._modules[program, width] = self.compile(source(program), names)
        name = kernel_name(kernel, *types)
        return self._modules[program, width].get_function(name)

    def _value(self, argument: Any) -> Any:
        """As kernels take it: None as a null pointer, numbers in their exact types."""
        if argument is None:
            return np.uint64(0)
        if isinstance(argument, int):
            return np.int32(argument)
        if isinstance(argument, float):
            return self.dtype.type(argument)
        return argument


def is_aligned(x: Array, lanes: int) -> bool:
    """True where one access may move the first `lanes` items."""
    at = x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr
    return at % (lanes * x.itemsize) == 0


def chunks_of(rows: int) -> tuple[int, int]:
    """How many chunks of how many rows are summed by themselves."""
    size = max(CHUNK, -(-rows // SUM_BLOCKS))
    return max(1, -(-rows // size)), size
