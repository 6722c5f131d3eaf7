"""Ops whose passes between matrix products are CUDA kernels.

The array module and the compiler of kernels are given, so that tests run the same ops
and kernels on a CPU.
"""

from mpipar.ops.cuda.attention import CudaAttentionOps
from mpipar.ops.cuda.embedding import CudaEmbeddingOps
from mpipar.ops.cuda.loss import CudaLossOps
from mpipar.ops.cuda.norms import CudaNormOps
from mpipar.ops.cuda.optimizer import CudaOptimizerOps
from mpipar.ops.cuda.positions import CudaPositionOps
from mpipar.ops.cuda.products import CudaProductOps
from mpipar.ops.cuda.rows import CudaRowOps


class CudaOps(
    CudaAttentionOps,
    CudaNormOps,
    CudaPositionOps,
    CudaProductOps,
    CudaEmbeddingOps,
    CudaLossOps,
    CudaOptimizerOps,
    CudaRowOps,
):
    """Same signatures as the reference, same results up to rounding, and the same from
    run to run: no sum depends on the order in which blocks run.

    Dense products are those of cuBLASLt; which algorithm it takes may be timed, and so
    differ from run to run (`products.Products`). Without kernels of their own are
    rope_table, row_sum and erf: they are the reference's array operations.
    """

    @property
    def narrow_results(self) -> bool:
        return self.is_mixed
