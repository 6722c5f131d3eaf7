"""Embedding by CUDA kernels."""

from typing import Any

import numpy as np

from mpipar.ops.cuda.arrays import CudaArrayOps
from mpipar.ops.cuda.launch import THREADS

Array = Any

# Chunks that tokens are counted in, at most, and tokens of one, at least
CHUNKS, CHUNK = 64, 1024
# Sorted tokens that a block adds up; as in embedding.cu
SORTED = 64


class CudaEmbeddingOps(CudaArrayOps):
    """Rows of a table; its gradient is made of sorted tokens."""

    def embedding_fwd(self, ids: Array, table: Array, *, first: int = 0) -> Array:
        width = table.shape[1]
        y = self.empty((*ids.shape, width))
        self.launch.by_row(
            "embedding_fwd", [table.dtype, self.dtype], ids.size, width,
            self._index(ids), self._solid(table), y, np.int64(first),
            np.int64(len(table)),
        )  # fmt: skip
        return y

    def embedding_dw(
        self, dy: Array, ids: Array, dtable: Array, *, first: int = 0
    ) -> None:
        if 0 in (ids.size, *dtable.shape):
            return
        dtable, (rows, width) = self._in_place(dtable, dtable.dtype), dtable.shape
        order, keys, begins = self._sorted(ids, first, rows)
        blocks = -(-ids.size // SORTED)
        parts, types = self.empty((2 * blocks, width)), [self.dtype, dtable.dtype]
        grid, threads = (blocks,), self.launch.threads(width)
        self.launch.in_blocks(
            "embedding_sums", types, grid, threads,
            width, self._compute(dy), order, keys, begins[rows:], dtable, parts,
        )  # fmt: skip
        self.launch.in_blocks(
            "embedding_joins", types, grid, threads,
            width, keys, begins[rows:], parts, dtable,
        )  # fmt: skip

    def _sorted(self, ids: Array, first: int, rows: int) -> tuple[Array, Array, Array]:
        """Tokens by row, these rows, and where each row begins; equal ones stay in
        order. The host does not wait for it.   (tokens,), (tokens,), (rows + 1,)"""
        flat, xp = self._index(ids).reshape(-1), self.xp
        chunk = max(CHUNK, -(-flat.size // CHUNKS))
        chunks = -(-flat.size // chunk)
        counts = xp.zeros((chunks, rows), np.int32)
        order, keys = (xp.empty(flat.shape, np.int32) for _ in "12")
        begins = xp.empty((rows + 1,), np.int32)
        given = flat.size, flat, np.int64(first), rows, chunk
        launch, grid = self.launch, (chunks,)
        launch.in_blocks("count_rows", [], grid, THREADS, *given, counts)
        launch.over_items("sum_counts", [], rows, chunks, counts, begins)
        launch.in_blocks("place_rows", [], (1,), 1024, rows, begins)
        launch.in_blocks(
            "sort_tokens", [], grid, THREADS, *given, counts, begins, order, keys
        )
        return order, keys, begins
