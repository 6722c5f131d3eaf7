"""cuDNN's Python frontend, as far as attention goes, on the CPU.

Graphs are refused for what the real frontend refuses, and run with NumPy on what lies
at the addresses: with the emulated CuPy, when the stream comes to it.
"""

import ctypes
import sys
from enum import Enum

import numpy as np


class data_type(Enum):  # noqa: N801
    NOT_SET, FLOAT, HALF, BFLOAT16 = 0, "f4", "f2", "u2"


class heur_mode(Enum):  # noqa: N801
    A, FALLBACK = 0, 1


class diagonal_alignment(Enum):  # noqa: N801
    TOP_LEFT, BOTTOM_RIGHT = 0, 1


class cudnnGraphNotSupportedError(Exception):  # noqa: N801, N818
    pass


handles: dict[int, int] = {}
counts = {"plans": 0, "runs": 0}
WIDEST, WORKSPACE = 256, 1024


def backend_version() -> int:
    return 92800


def create_handle() -> int:
    handles[len(handles) + 1] = 0
    return len(handles)


def set_stream(handle: int, stream: int) -> None:
    handles[handle] = stream


class Tensor:
    """Sizes and strides of what lies at an address; setters give it back."""

    def __init__(self, dim=None, stride=None, data_type=data_type.NOT_SET, name=""):
        self.dim, self.stride, self.kind, self.name = dim, stride, data_type, name
        self.uid, self.is_output = None, False

    def set_uid(self, uid):
        assert type(uid) is int
        self.uid = uid
        return self

    def set_output(self, is_output):
        self.is_output = is_output
        return self

    def set_data_type(self, kind):
        self.kind = kind
        return self

    def set_dim(self, dim):
        assert type(dim) is list and all(type(x) is int for x in dim)
        self.dim = dim
        return self

    def set_stride(self, stride):
        assert type(stride) is list and all(type(x) is int for x in stride)
        self.stride = stride
        return self

    def view(self, address: int) -> np.ndarray:
        """What lies there."""
        if address % 16:
            raise RuntimeError(f"{self.name}: the address is not a multiple of 16")
        dtype = np.dtype(self.kind.value)
        last = sum(
            (n - 1) * step for n, step in zip(self.dim, self.stride, strict=True)
        )
        raw = (ctypes.c_char * ((last + 1) * dtype.itemsize)).from_address(address)
        steps = [step * dtype.itemsize for step in self.stride]
        flat = np.frombuffer(raw, dtype)
        return np.lib.stride_tricks.as_strided(flat, self.dim, steps)


def _read(x: np.ndarray) -> np.ndarray:
    if x.dtype == np.uint16:
        x = np.left_shift(x, 16, dtype=np.uint32).view(np.float32)
    return x.astype(np.float64)


def _write(values: np.ndarray, out: np.ndarray) -> None:
    if out.dtype == np.uint16:
        bits = values.astype(np.float32).view(np.uint32)
        values = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    out[...] = values


class pygraph:  # noqa: N801
    """One attention, forward or backward."""

    def __init__(
        self, *, io_data_type, intermediate_data_type, compute_data_type, handle
    ):
        assert handle in handles
        assert intermediate_data_type is compute_data_type is data_type.FLOAT
        self.io, self.state, self.tensors = io_data_type, "new", []

    def tensor(self, *, name, dim, stride, data_type):
        assert all(type(x) is int for x in (*dim, *stride))
        self.tensors.append(Tensor(dim, stride, data_type, name))
        return self.tensors[-1]

    def sdpa(self, *, name, q, k, v, generate_stats, **rule):
        self.inputs, self.outputs = (q, k, v), (Tensor(name="o"), Tensor(name="stats"))
        self.rule, self.work = rule, self._forward
        assert generate_stats is True
        return self.outputs

    def sdpa_backward(
        self, *, name, q, k, v, o, dO, stats, use_deterministic_algorithm, **rule  # noqa: N803
    ):  # fmt: skip
        self.inputs = q, k, v, o, dO, stats
        self.outputs = tuple(Tensor(name=n) for n in ("dq", "dk", "dv"))
        self.rule, self.work = rule, self._backward
        assert use_deterministic_algorithm is True
        return self.outputs

    # The steps of a build, in their order
    def validate(self):
        assert self.state == "new"
        for x in (*self.inputs, *self.outputs):
            if x.uid is None or x.dim is None or x.kind is data_type.NOT_SET:
                raise RuntimeError(f"{x.name} has no uid, sizes or type")
        if not all(x.is_output for x in self.outputs):
            raise RuntimeError("a tensor that is not declared an output")
        q, k = self.inputs[:2]
        if q.dim[1] % k.dim[1] or q.stride[3] != 1:
            raise RuntimeError("heads that do not divide, or items with gaps")
        self.state = "valid"

    def build_operation_graph(self):
        assert self.state == "valid"
        self.state = "graph"

    def create_execution_plans(self, modes):
        assert self.state == "graph" and modes
        self.state = "plans"

    def check_support(self):
        assert self.state == "plans"
        if self.inputs[0].dim[3] % 8 or self.inputs[0].dim[3] > WIDEST:
            raise cudnnGraphNotSupportedError("the width of a head")
        self.state = "supported"

    def build_plans(self):
        assert self.state == "supported"
        self.state = "built"
        counts["plans"] += 1

    def get_workspace_size(self):
        assert self.state == "built"
        return WORKSPACE

    def execute(self, addresses, workspace, *, handle):
        assert self.state == "built" and workspace % 16 == 0 and workspace
        assert all(type(x) is int for x in (*addresses, *addresses.values()))
        assert addresses.keys() == {x.uid for x in (*self.inputs, *self.outputs)}
        counts["runs"] += 1

        def run():
            # The workspace is written over, by the bytes that were asked for.
            ctypes.memset(workspace, 0xFF, WORKSPACE)
            self.work(
                *(x.view(addresses[x.uid]) for x in (*self.inputs, *self.outputs))
            )

        streams = sys.modules.get("cupy.cuda.streams")
        if streams is None:
            run()
        else:
            streams.queues[handles[handle]].submit(run)

    def _scores(self, q, k):
        rule = dict(self.rule)
        assert rule.pop("diagonal_alignment") is diagonal_alignment.TOP_LEFT
        assert rule.pop("diagonal_band_right_bound") == 0
        scale, band = rule.pop("attn_scale"), rule.pop("diagonal_band_left_bound", None)
        assert type(scale) is float and not rule
        scores = scale * _read(q) @ _heads(k, q).swapaxes(-1, -2)
        rows, columns = np.indices(scores.shape[-2:])
        hidden = columns > rows
        if band is not None:
            hidden |= columns + band <= rows
        return np.where(hidden, -np.inf, scores), scale

    def _forward(self, q, k, v, o, stats):
        scores, _ = self._scores(q, k)
        top = scores.max(-1, keepdims=True)
        total = np.exp(scores - top).sum(-1, keepdims=True)
        _write(top + np.log(total), stats)
        _write(np.exp(scores - top) / total @ _heads(v, q), o)

    def _backward(self, q, k, v, o, do, stats, dq, dk, dv):
        scores, scale = self._scores(q, k)
        p, do = np.exp(scores - _read(stats)), _read(do)
        delta = (do * _read(o)).sum(-1, keepdims=True)
        ds = p * (do @ _heads(v, q).swapaxes(-1, -2) - delta)
        shared = *k.shape[:2], -1, *k.shape[2:]
        _write(scale * ds @ _heads(k, q), dq)
        grads = scale * ds.swapaxes(-1, -2) @ _read(q), p.swapaxes(-1, -2) @ do
        for grad, out in zip(grads, (dk, dv), strict=True):
            _write(grad.reshape(shared).sum(axis=2), out)


def _heads(x: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Key/value heads, one for each query head."""
    return np.repeat(_read(x), q.shape[1] // x.shape[1], axis=1)
