"""Gradient sums: over the data axis in buckets during backward, then over replicas."""

from collections.abc import Mapping
from typing import Any

from mpipar.zero.flat import FlatState

Array = Any


class GradientReducer:
    """Starts the reduction of a bucket as soon as all of its gradients are final.

    Backward finishes units from the last to the first, so a bucket is the stretch of
    the flat gradient from the unit just finished to the last bucket started. A stretch
    of at least `bucket_bytes` is reduced by one message (Li et al. 2020, 3.2.3).

    axis       communicator of the data axis
    replicas   communicator of each axis that parameters name as `partial`
    """

    def __init__(
        self,
        flat: FlatState,
        axis: Any,
        replicas: Mapping[str, Any],
        bucket_bytes: float,
    ) -> None:
        self.flat, self.axis, self.replicas = flat, axis, replicas
        self.bucket_bytes = bucket_bytes
        self._handles: list[Any] = []
        self._open = flat.size

    def unit_done(self, index: int) -> None:
        """The gradients of unit `index` and of all later units are final."""
        for handle in self._handles:
            handle.test()
        lo = self.flat.units[index][0]
        if (self._open - lo) * self.flat.grad.dtype.itemsize >= self.bucket_bytes:
            self._start(lo)

    def finish(self) -> None:
        """Waits until every gradient is the sum over all of its axes."""
        self._start(0)
        for handle in self._handles:
            handle.wait()
        self._handles.clear()
        self._open = self.flat.size
        for axis, comm in self.replicas.items():
            self._sum_replicas(axis, comm)

    def _start(self, lo: int) -> None:
        if lo < self._open:
            part = self.flat.grad[lo : self._open]
            self._handles.append(self.axis.all_reduce_start(part))
            self._open = lo

    def _sum_replicas(self, axis: str, comm: Any) -> None:
        """Sums, in one message, the gradients that are summands over this axis."""
        parts = [p.grad for p in self.flat.parameters if p.partial == axis]
        if not parts:
            return
        packed = self.flat.ops.xp.concatenate([g.reshape(-1) for g in parts])
        packed = comm.all_reduce(packed)
        start = 0
        for g in parts:
            g[...] = packed[start : start + g.size].reshape(g.shape)
            start += g.size
