"""Attention of whole causal sequences by cuDNN, through its Python frontend.

The frontend (`nvidia-cudnn-frontend`, imported as `cudnn`) describes an operation as a
graph of tensors by sizes and strides, and is given addresses when it runs. A graph is
built once for all calls of the same sizes, strides and scale.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpipar.errors import DeviceError
from mpipar.ops.cuda.device import HostDevice
from mpipar.ops.half import BF16

Array = Any

# Widest heads it is asked for, and what their width is a multiple of
WIDEST, PACK = 256, 8
# Names of tensors in a graph
Q, K, V, OUT, STATS, DO, DQ, DK, DV = range(1, 10)


class Refused(Exception):
    """cuDNN has no kernel for an attention."""


class Plan:
    """A graph that is built, and the bytes that it needs beside its tensors."""

    def __init__(self, cudnn: Any, graph: Any) -> None:
        """Raises Refused where cuDNN does not support it."""
        modes = [cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK]
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans(modes)
            graph.check_support()
            graph.build_plans()
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
            raise Refused(str(error)) from error
        self.graph, self.size = graph, graph.get_workspace_size()


class CudnnAttention:
    """Attention of 16-bit heads whose queries see a band of keys before them.

    Results and gradients are written, and are equal from run to run.

    device   where arrays lie;  operand  their type;  version  of cuDNN
    Raises   DeviceError where the frontend or cuDNN is not installed
    """

    def __init__(self, device: HostDevice, operand: np.dtype) -> None:
        try:
            import cudnn
        except (ImportError, OSError, RuntimeError, AssertionError) as error:
            # It looks for cuDNN when it is imported.
            raise DeviceError(
                'train.attention = "cudnn" needs cuDNN and its frontend: pip install '
                f'"mpipar[cuda12]" or "mpipar[cuda13]"; {error}'
            ) from error
        self.cudnn, self.device = cudnn, device
        try:
            self.handle, number = cudnn.create_handle(), cudnn.backend_version()
        except RuntimeError as error:
            raise DeviceError(f"cuDNN cannot be used: {error}") from error
        self.version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        kinds = cudnn.data_type
        self.operand = kinds.BFLOAT16 if operand == BF16 else kinds.HALF
        self._stream: int | None = None
        self._plans: dict[tuple, Plan | Refused] = {}
        # Old ones stay: graphs that were captured hold their addresses.
        self._workspaces: dict[int, list[tuple[int, int, Any]]] = {}

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        lse: Array,
        *,
        scale: float,
        window: int,
    ) -> None:
        """Writes o = softmax(scale · q kᵀ + mask) v and its log-sum-exp.

        window   positions that a query sees, its own included; at least s = all before
        Shapes   as in `Ops.attention_fwd`, all of the operand type but lse
        Raises   Refused
        """
        tensors = {Q: q, K: k, V: v, OUT: o, STATS: lse}
        self._run(self._forward_graph, tensors, scale, window)

    def backward(
        self,
        do: Array,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        lse: Array,
        dq: Array,
        dk: Array,
        dv: Array,
        *,
        scale: float,
        window: int,
    ) -> None:
        """Writes dq, dk, dv. Otherwise as `forward`."""
        tensors = {Q: q, K: k, V: v, OUT: o, STATS: lse, DO: do, DQ: dq, DK: dk, DV: dv}
        self._run(self._backward_graph, tensors, scale, window)

    def _run(
        self,
        make: Callable[..., Any],
        tensors: dict[int, Array],
        scale: float,
        window: int,
    ) -> None:
        forms = {uid: _form(x, uid == STATS) for uid, x in tensors.items()}
        s = tensors[Q].shape[1]
        band = window if window < s else None
        name = make.__name__, scale, band, *forms.values()
        if name not in self._plans:
            try:
                self._plans[name] = Plan(self.cudnn, make(forms, scale, band))
            except Refused as refusal:
                sizes = f"queries {forms[Q][0]} and keys {forms[K][0]}"
                self._plans[name] = Refused(f"{sizes}: {refusal}")
        plan = self._plans[name]
        if isinstance(plan, Refused):
            raise plan
        stream = self.device.stream()
        if stream != self._stream:
            self.cudnn.set_stream(self.handle, stream)
            self._stream = stream
        addresses = {uid: self.device.address(x) for uid, x in tensors.items()}
        workspace = self._workspace(stream, plan.size)
        plan.graph.execute(addresses, workspace, handle=self.handle)

    def _workspace(self, stream: int, size: int) -> int:
        """Address of memory that graphs on this stream share."""
        own = self._workspaces.setdefault(stream, [])
        if not own or own[-1][1] < size:
            at, owner = self.device.allocate(max(size, 1))
            own.append((at, size, owner))
        return own[-1][0]

    def _graph(self) -> Any:
        sums = self.cudnn.data_type.FLOAT
        return self.cudnn.pygraph(
            io_data_type=self.operand,
            intermediate_data_type=sums,
            compute_data_type=sums,
            handle=self.handle,
        )

    def _inputs(self, graph: Any, forms: dict, *uids: int) -> list[Any]:
        tensors = []
        for uid in uids:
            sizes, strides = forms[uid]
            kind = self.cudnn.data_type.FLOAT if uid == STATS else self.operand
            tensors.append(
                graph.tensor(
                    name=f"x{uid}",
                    dim=list(sizes),
                    stride=list(strides),
                    data_type=kind,
                )
            )
            tensors[-1].set_uid(uid)
        return tensors

    def _output(self, tensor: Any, forms: dict, uid: int) -> None:
        sizes, strides = forms[uid]
        kind = self.cudnn.data_type.FLOAT if uid == STATS else self.operand
        tensor.set_output(True).set_uid(uid).set_data_type(kind)
        tensor.set_dim(list(sizes)).set_stride(list(strides))

    def _rule(self, scale: float, band: int | None) -> dict[str, Any]:
        """A query at i sees keys i − band + 1 … i."""
        rule = {
            "attn_scale": scale,
            "diagonal_alignment": self.cudnn.diagonal_alignment.TOP_LEFT,
            "diagonal_band_right_bound": 0,
        }
        return rule if band is None else rule | {"diagonal_band_left_bound": band}

    def _forward_graph(self, forms: dict, scale: float, band: int | None) -> Any:
        graph = self._graph()
        q, k, v = self._inputs(graph, forms, Q, K, V)
        o, stats = graph.sdpa(
            name="attention", q=q, k=k, v=v, generate_stats=True,
            **self._rule(scale, band),
        )  # fmt: skip
        self._output(o, forms, OUT)
        self._output(stats, forms, STATS)
        return graph

    def _backward_graph(self, forms: dict, scale: float, band: int | None) -> Any:
        graph = self._graph()
        q, k, v, o, stats, do = self._inputs(graph, forms, Q, K, V, OUT, STATS, DO)
        grads = graph.sdpa_backward(
            name="attention_backward", q=q, k=k, v=v, o=o, dO=do, stats=stats,
            use_deterministic_algorithm=True, **self._rule(scale, band),
        )  # fmt: skip
        for grad, uid in zip(grads, (DQ, DK, DV), strict=True):
            self._output(grad, forms, uid)
        return graph


def _form(x: Array, is_stats: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides (sequences, heads, places, items) of heads (b, s, n, h), or of
    the log-sum-exp (b, n, s)."""
    steps = [step // x.itemsize for step in x.strides]
    if is_stats:
        return (*x.shape, 1), (*steps, 1)
    b, s, n, h = x.shape
    return (b, n, s, h), (steps[0], steps[2], steps[1], steps[3])
