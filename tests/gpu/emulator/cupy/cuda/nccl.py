"""cupy.cuda.nccl, emulated: what a rank gives to a call lies in a file for the others.

It is put there when the call is made, which on a device would happen some time later;
what the others gave is read when the stream is waited for. CUPY_EMULATOR_NCCL = 0 is a
machine without the library.
"""

import os
import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cupy.cuda import memory, runtime, streams

NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32 = 0, 1, 2, 3
NCCL_INT64, NCCL_UINT64, NCCL_FLOAT16, NCCL_FLOAT32 = 4, 5, 6, 7
NCCL_FLOAT64, NCCL_BFLOAT16 = 8, 9
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = 0, 1, 2, 3
_TYPES = ["i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "u2"]
_LIMIT_S = 10.0

available = os.environ.get("CUPY_EMULATOR_NCCL") != "0"


class NcclError(RuntimeError):
    """What a call returned."""


def get_version() -> int:
    return 22707


def get_unique_id() -> bytes:
    return secrets.token_bytes(128)


# What the calls of an open group are to do once all have been made
_group: list | None = None


def groupStart() -> None:
    global _group
    _group = []


def groupEnd() -> None:
    global _group
    works, _group = _group, None
    for queue, work in works:
        queue.submit(work)


class NcclCommunicator:
    """One rank of `ndev`; all name the same id."""

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        self._size, self._rank = ndev, rank
        name = f"nccl-emulator-{commId[:16].hex()}"
        self._folder = Path(tempfile.gettempdir()) / name
        self._folder.mkdir(exist_ok=True)
        self._calls: Counter[str] = Counter()
        devices = [d[0] for d in self._all(np.array([runtime.getDevice()]), "init")()]
        if len(set(devices)) < ndev:
            raise NcclError("NCCL_ERROR_INVALID_USAGE: invalid usage")

    def size(self) -> int:
        return self._size

    def rank_id(self) -> int:
        return self._rank

    def device_id(self) -> int:
        return runtime.getDevice()

    def check_async_error(self) -> None:
        """Nothing has failed."""

    def allReduce(
        self,
        sendbuf: int,
        recvbuf: int,
        count: int,
        datatype: int,
        op: int,
        stream: int,
    ) -> None:
        parts = self._call("allReduce", sendbuf, count, datatype, stream)
        self._later(stream, recvbuf, lambda: _reduced(parts(), datatype, op))

    def reduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int,
        root: int, stream: int,
    ) -> None:  # fmt: skip
        parts = self._call("reduce", sendbuf, count, datatype, stream)
        if self._rank == root:
            self._later(stream, recvbuf, lambda: _reduced(parts(), datatype, op))

    def reduceScatter(
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int,
        stream: int,
    ) -> None:  # fmt: skip
        count, rank = recvcount * self._size, self._rank
        parts = self._call("reduceScatter", sendbuf, count, datatype, stream)
        own = slice(rank * recvcount, (rank + 1) * recvcount)
        self._later(
            stream, recvbuf, lambda: _reduced([p[own] for p in parts()], datatype, op)
        )

    def allGather(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int
    ) -> None:
        parts = self._call("allGather", sendbuf, count, datatype, stream)
        self._later(stream, recvbuf, lambda: np.concatenate(parts()))

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int,
        stream: int,
    ) -> None:  # fmt: skip
        own = sendbuff if self._rank == root else recvbuff
        parts = self._call("broadcast", own, count, datatype, stream)
        self._later(stream, recvbuff, lambda: parts()[root])

    def send(
        self, sendbuf: int, count: int, datatype: int, peer: int, stream: int
    ) -> None:
        streams.queues[stream].run()
        name = self._name(f"{self._rank}to{peer}", "send")
        self._put(name, _seen(sendbuf, count, datatype))

    def recv(
        self, recvbuf: int, count: int, datatype: int, peer: int, stream: int
    ) -> None:
        name, kind = self._name(f"{peer}to{self._rank}", "recv"), _TYPES[datatype]
        self._later(stream, recvbuf, lambda: self._get(name, kind))

    def destroy(self) -> None:
        self._put(f"end.{self._rank}", np.zeros(1))
        if len(list(self._folder.glob("end.?"))) == self._size:
            shutil.rmtree(self._folder, ignore_errors=True)

    def abort(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _call(self, op: str, place: int, count: int, datatype: int, stream: int):
        """Give the own array to the others; return how to get those of all."""
        streams.queues[stream].run()
        return self._all(_seen(place, count, datatype), op)

    def _all(self, own: np.ndarray, op: str):
        # Under one name, so that calls that do not belong together differ in size
        name = self._name("call", "")
        self._put(f"{name}.{self._rank}", own)
        kind = own.dtype
        return lambda: [self._get(f"{name}.{r}", kind) for r in range(self._size)]

    def _name(self, channel: str, side: str) -> str:
        self._calls[channel + side] += 1
        return f"{channel}.{self._calls[channel + side]}"

    def _later(self, stream: int, place: int, make) -> None:
        def work() -> None:
            found = make()
            memory.bytes_at(place, found.nbytes)[...] = found.view(np.uint8)

        if _group is None:
            streams.queues[stream].submit(work)
        else:
            _group.append((streams.queues[stream], work))

    def _put(self, name: str, own: np.ndarray) -> None:
        draft = self._folder / f"{name}.draft"
        draft.write_bytes(own.tobytes())
        draft.rename(self._folder / name)

    def _get(self, name: str, kind: object) -> np.ndarray:
        until, file = time.monotonic() + _LIMIT_S, self._folder / name
        while not file.exists():
            if time.monotonic() > until:
                raise NcclError(f"no rank has come to {name}")
            time.sleep(1e-4)
        return np.frombuffer(file.read_bytes(), kind)


def _seen(place: int, count: int, datatype: int) -> np.ndarray:
    kind = np.dtype(_TYPES[datatype])
    return memory.bytes_at(place, count * kind.itemsize).view(kind)


def _reduced(parts: Sequence[np.ndarray], datatype: int, op: int) -> np.ndarray:
    if datatype == NCCL_BFLOAT16:
        wide = [(part.astype("u4") << 16).view("f4") for part in parts]
        bits = np.ascontiguousarray(_reduced(wide, NCCL_FLOAT32, op)).view("u4")
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("u2")
    join = {NCCL_SUM: np.add, NCCL_MAX: np.maximum}[op]
    total = parts[0].copy()
    for part in parts[1:]:
        join(total, part, out=total)
    return total
