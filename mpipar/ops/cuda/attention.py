"""Attention by CUDA kernels."""

import warnings
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import numpy as np

from mpipar.errors import DeviceError
from mpipar.ops.attention import Draws
from mpipar.ops.cuda.arrays import CudaArrayOps
from mpipar.ops.cuda.cudnn_attention import PACK, WIDEST, CudnnAttention, Refused
from mpipar.ops.cuda.kept import DeviceSpans, Kept, device_spans
from mpipar.ops.cuda.launch import (
    ATTENTION_ROWS,
    FLASH_ROWS,
    FLASH_SHORT,
    FLASH_TILE,
    WARP,
)
from mpipar.ops.half import is_half
from mpipar.ops.philox import drop_limit

Array = Any

# Widths of heads that kernels with tensor cores are made for; others are padded
FLASH_WIDTHS = (64, 96, 128)


class CudaAttentionOps(CudaArrayOps):
    """Attention of `Ops` by kernels: of 16-bit heads by tensor cores, with sums in
    float32, where their width is a multiple of 8 up to 128; else in the compute type.
    In mixed precision cuDNN's take the place of these for whole sequences without
    dropout, where `choose_attention` found it.

    Gradients are added to arrays of the compute type, and written over those of the
    operand type in mixed precision.
    """

    cudnn: CudnnAttention | None = None
    _attention_method = ""

    def choose_attention(self, choice: str, device: Any) -> None:
        """Who works on whole sequences in mixed precision.

        choice   "cudnn"; "flash" = own kernels; "auto" = cuDNN where it is installed
        Raises   DeviceError where "cudnn" is asked for and cannot be had
        """
        self._attention_method = "own attention kernels"
        self._must_be_cudnn = choice == "cudnn"
        if not self.is_mixed or choice == "flash":
            return
        try:
            self.cudnn = CudnnAttention(device, self.operand_dtype)
        except DeviceError as error:
            if choice == "cudnn":
                raise
            self._attention_method += f" ({error})"
        else:
            self._attention_method = f"attention by cuDNN {self.cudnn.version}"

    @property
    def attention_method(self) -> str:
        return self._attention_method

    def attention_fwd(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        scale: float,
        spans: np.ndarray,
        dropout: Draws | None = None,
        part: bool = False,
    ) -> tuple[Array, Array]:
        b, s, n, h = q.shape
        o = self.zeros(q.shape) if part else self.empty_operand(q.shape)
        lse, on = self.empty((b, n, s)), self._spans(spans)
        if not part and dropout is None and self._is_whole(on, q, k, v):
            heads = q, k, v, o, lse
            if self._by_cudnn(self.cudnn.forward, heads, scale, on.window):
                return o, lse
        if width := self._flash_width(h):
            q, k, v = (self._packed(x) for x in (q, k, v))
            kept = (FLASH_ROWS + 2 * FLASH_TILE) * (width + PACK)
            self.launch.by_tiles(
                "flash_fwd", [self.operand_dtype, width], (s, n, b), kept,
                h, q, k, v, *self._sides(o), lse, on.begin, on.end, on.step, s,
                n // k.shape[2], float(scale), *_steps(q, k, v),
                *self._drawn(dropout),
            )  # fmt: skip
            return o, lse
        q, k, v = (self._of_compute(x) for x in (q, k, v))
        self.launch.by_warps(
            "attention_fwd", [self.dtype, o.dtype], (s, n, b), _kept(2, h),
            h, q, k, v, o, lse, on.begin, on.end, on.step, s, n // k.shape[2],
            float(scale), *_steps(q, k, v), *self._drawn(dropout),
        )  # fmt: skip
        return o, lse

    def attention_bwd(
        self,
        do: Array,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        lse: Array,
        *,
        dq: Array,
        dk: Array,
        dv: Array,
        scale: float,
        spans: np.ndarray,
        dropout: Draws | None = None,
    ) -> None:
        on, drawn = self._spans(spans), self._drawn(dropout)
        grads = dq, dk, dv
        if dropout is None and self._is_whole(on, q, k, v, *grads):
            do, o = (self._packed(self._solid(x)) for x in (do, o))
            heads = do, q, k, v, o, lse, *grads
            if self._by_cudnn(self.cudnn.backward, heads, scale, on.window):
                return
        if width := self._flash_width(q.shape[3]):
            do, o = (self._packed(self._solid(x)) for x in (do, o))
            q, k, v = (self._packed(x) for x in (q, k, v))
            self._flash_bwd(width, do, q, k, v, o, lse, *grads, float(scale), on, drawn)
            return
        do, q, k, v = (self._of_compute(x) for x in (do, q, k, v))
        sums = [
            self.zeros(x.shape) if self.is_mixed and is_half(x.dtype) else x
            for x in grads
        ]
        self._plain_bwd(do, q, k, v, o, lse, *sums, float(scale), on, drawn)
        for grad, total in zip(grads, sums, strict=True):
            if total is not grad:
                self.store(total, grad)

    def _plain_bwd(
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
        scale: float,
        on: DeviceSpans,
        drawn: list,
    ) -> None:
        (b, s, n, h), (_, t, g, _) = q.shape, k.shape
        do, o = (self._solid(x) for x in (do, o))
        delta, of = self.empty(lse.shape), (on.begin, on.end, on.count, on.step)
        self.launch.by_warps(
            "attention_bwd_q", [self.dtype, o.dtype], (s, n, b), _kept(3, h),
            h, do, q, k, v, o, lse, delta, dq, *of, s, n // g, scale,
            *_steps(q, k, v, dq), *drawn,
        )  # fmt: skip
        self.launch.by_warps(
            "attention_bwd_kv", [self.dtype], (t, g, b), _kept(4, h),
            h, do, q, k, v, lse, delta, dk, dv, *of, *self._key_reach(on, t), s, t,
            n // g, scale, *_steps(q, k, v, dk, dv), *drawn,
        )  # fmt: skip

    def _flash_bwd(
        self,
        width: int,
        do: Array,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        lse: Array,
        dq: Array,
        dk: Array,
        dv: Array,
        scale: float,
        on: DeviceSpans,
        drawn: list,
    ) -> None:
        (b, s, n, h), (_, t, g, _) = q.shape, k.shape
        delta, of = self.empty(lse.shape), (on.begin, on.end, on.count, on.step)
        types, kept = [self.operand_dtype, width], 2 * (FLASH_ROWS + FLASH_SHORT)
        kept *= width + PACK
        self.launch.by_tiles(
            "flash_bwd_q", types, (s, n, b), kept,
            h, do, q, k, v, o, lse, delta, *self._sides(dq), *of, s, n // g, scale,
            *_steps(q, k, v, dq), *drawn,
        )  # fmt: skip
        key, value = self._sides(dk), self._sides(dv)
        self.launch.by_tiles(
            "flash_bwd_kv", types, (t, g, b), kept,
            h, do, q, k, v, lse, delta, key[0], value[0], key[1], value[1], *of,
            *self._key_reach(on, t), s, t, n // g, scale,
            *_steps(q, k, v, dk, dv), *drawn,
        )  # fmt: skip

    def attention_merge(self, o: Array, lse: Array, part: Array, level: Array) -> None:
        b, s, n, h = o.shape
        self.launch.by_row(
            "attention_merge", [self.dtype], b * s * n, h,
            self._in_place(o), self._in_place(lse), self._compute(part),
            self._compute(level), s, n,
        )  # fmt: skip

    # --- cuDNN ------------------------------------------------------------------------

    def _is_whole(self, on: DeviceSpans, *heads: Array) -> bool:
        """True where cuDNN is there and may take these: 16-bit heads of whole sequences
        that are causal, with a window or not.

        Keys of a cache are left to own kernels: cuDNN takes a second to prepare for
        each length. They show by other strides than those of queries.
        """
        if self.cudnn is None or not on.window:
            return False
        q, h = heads[0], heads[0].shape[3]
        if h % PACK or h > WIDEST:
            return False
        return all(
            x.dtype == self.operand_dtype
            and x.shape[1] == q.shape[1]
            and x.strides[:2] == q.strides[:2]
            and self._is_packed(x)
            for x in heads
        )

    def _by_cudnn(
        self, run: Callable[..., None], heads: tuple, scale: float, window: int
    ) -> bool:
        """False where cuDNN has no kernel for these heads.

        Raises   DeviceError instead where there must be one
        """
        try:
            run(*heads, scale=float(scale), window=window)
        except Refused as refusal:
            text = f"cuDNN has no attention for {refusal}"
            if self._must_be_cudnn:
                raise DeviceError(
                    f'{text}; try train.attention = "auto" or "flash"'
                ) from refusal
            warnings.warn(f"{text}; own kernels do it", RuntimeWarning, stacklevel=2)
            return False
        return True

    # --- arguments --------------------------------------------------------------------

    def _flash_width(self, h: int) -> int | None:
        """Which width of heads a kernel with tensor cores has for these, if any."""
        if not self.is_mixed or h % PACK:
            return None
        return next((width for width in FLASH_WIDTHS if h <= width), None)

    def _packed(self, x: Array) -> Array:
        """x in the operand type, each head at a multiple of 16 bytes; a copy only where
        that is not so."""
        x = self.operand(x)
        return x if self._is_packed(x) else x.copy(order="C")

    def _is_packed(self, x: Array) -> bool:
        even = all(step % (PACK * x.itemsize) == 0 for step in x.strides[:3])
        at = x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr
        return even and x.strides[3] == x.itemsize and at % 16 == 0

    def _of_compute(self, x: Array) -> Array:
        """Heads in the compute type, by strides. Raises TypeError for a third type."""
        x = self.wide(x)
        if x.dtype != self.dtype:
            raise TypeError(f"heads are to be of {self.dtype}")
        return x

    def _sides(self, x: Array) -> tuple[Array | None, Array | None]:
        """x where 16-bit items go, and where sums do; None for the other.

        Raises ValueError where 16-bit heads do not lie at multiples of 16 bytes.
        """
        if x.dtype != self.operand_dtype:
            return None, x
        if not self._is_packed(x):
            raise ValueError(
                f"heads of {x.shape} items are not at multiples of 16 bytes"
            )
        return x, None

    def _spans(self, spans: np.ndarray) -> DeviceSpans:
        return self._kept_spans(spans)

    @cached_property
    def _kept_spans(self) -> Kept:
        return Kept(partial(device_spans, self.xp))

    @cached_property
    def _kept_draws(self) -> Kept:
        return Kept(self.xp.asarray)

    def _key_reach(self, on: DeviceSpans, keys: int) -> tuple[Array, Array, np.int64]:
        if keys not in on.reaches:
            shape = len(on.begin), -(-keys // FLASH_ROWS)
            first, last = (self.xp.empty(shape, np.int32) for _ in range(2))
            self.launch.key_reach(on.begin, on.end, first, last)
            on.reaches[keys] = first, last, np.int64(shape[1] if on.step else 0)
        return on.reaches[keys]

    def _drawn(self, dropout: Draws | None) -> list:
        """What kernels need to draw factors."""
        if dropout is None:
            return [None] * 4 + [np.uint32(0)] * 2 + [0.0]
        kept, low = self._kept_draws, 0xFFFFFFFF
        # Positions, like all of a counter's words, by their lower 32 bits
        rows, columns = (
            kept((x & low).astype(np.uint32)) for x in (dropout.queries, dropout.keys)
        )
        limit = drop_limit(dropout.rate)
        return [
            kept(np.array(dropout.streams, np.uint32)), self._index(dropout.samples),
            rows, columns, np.uint32(dropout.number & low), np.uint32(limit),
            1.0 / (1.0 - dropout.rate),
        ]  # fmt: skip


def _kept(rows: int, h: int) -> int:
    """Items of two tiles, and of so many rows of each warp."""
    return 2 * WARP * (h + 1) + rows * ATTENTION_ROWS * h


def _steps(*heads: Array) -> list[np.int64]:
    """Items from one sequence, place and head to the next, of each array.

    Raises ValueError where the items of a head have gaps.
    """
    if any(x.shape[-1] > 1 and x.strides[-1] != x.itemsize for x in heads):
        raise ValueError("the items of a head have gaps")
    return [np.int64(step // x.itemsize) for x in heads for step in x.strides[:3]]
