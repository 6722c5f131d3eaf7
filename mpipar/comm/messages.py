"""Messages of arrays between two ranks of an axis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mpipar.comm import mpi
from mpipar.comm.calls import Channel
from mpipar.comm.datatypes import as_bytes
from mpipar.comm.handle import Handle
from mpipar.comm.posts import pieces
from mpipar.comm.transport import Array


class Messages:
    """What a communicator offers besides collectives; it says how an operation begins.

    With ``synchronous`` set no send is buffered.
    """

    chunk_bytes = 1 << 30
    synchronous = False

    mpi: mpi.Comm
    name: str
    rank: int

    def send(self, x: Array, to: int, tag: int = 0) -> None:
        """Send ``x`` to rank ``to``; returns when ``x`` may be changed again."""
        self._send(x, to, tag, "send").wait()

    def send_start(self, x: Array, to: int, tag: int = 0) -> Handle:
        """Start ``send``."""
        return self._send(x, to, tag, "send")

    def recv(self, x: Array, source: int, tag: int = 0) -> Array:
        """Fill ``x`` with the message of rank ``source``; return it.

        Raises CommError if the message has another size.
        """
        return self._recv(x, source, tag, "recv").wait()

    def recv_start(self, x: Array, source: int, tag: int = 0) -> Handle:
        """Start ``recv``."""
        return self._recv(x, source, tag, "recv")

    def send_recv(
        self, x: Array, to: int, out: Array, source: int, tag: int = 0
    ) -> Array:
        """Send ``x`` to ``to``, fill ``out`` from ``source``; return ``out``."""
        arriving = self._recv(out, source, tag, "send_recv", calls=0)
        leaving = self._send(x, to, tag, "send_recv")
        arriving.wait()
        leaving.wait()
        return out

    def _begin(self, *args: Any, **options: Any) -> tuple[np.ndarray, Handle]:
        raise NotImplementedError

    def _put_back(self, flat: np.ndarray, x: Array) -> Array:
        raise NotImplementedError

    def _send(self, x: Array, to: int, tag: int, op: str) -> Handle:
        channel = self._message_channel(self.rank, to, tag)
        flat, handle = self._begin(op, x, x.nbytes, channel)
        posts = self._leave(flat, to, tag)
        return handle.launch(posts, lambda: self._sent(flat, x))

    def _recv(self, x: Array, source: int, tag: int, op: str, calls: int = 1) -> Handle:
        channel = self._message_channel(source, self.rank, tag)
        flat, handle = self._begin(op, x, 0, channel, calls)
        posts, expected = self._arrive(flat, source, tag)
        return handle.launch(posts, lambda: self._put_back(flat, x), expected)

    def _leave(self, flat: np.ndarray, to: int, tag: int) -> Iterator[mpi.Request]:
        """Send the pieces of an array."""
        post = self.mpi.Issend if self.synchronous else self.mpi.Isend
        for part in pieces(as_bytes(flat), self.chunk_bytes):
            yield post([part, mpi.BYTE], to, tag)

    def _arrive(
        self, flat: np.ndarray, source: int, tag: int
    ) -> tuple[list[mpi.Request], list[int]]:
        """Receive the pieces of an array; return the bytes of each as well."""
        parts = pieces(as_bytes(flat), self.chunk_bytes)
        posts = [self.mpi.Irecv([part, mpi.BYTE], source, tag) for part in parts]
        return posts, [part.size for part in parts]

    def _sent(self, flat: np.ndarray, x: Array) -> Array:
        """``flat`` has left."""
        return x

    def _message_channel(self, source: int, to: int, tag: int) -> Channel:
        """The channel of these messages, under the same name on both ends."""
        key = source, to, tag
        if key not in self._messages:
            ends = [self.members[source], self.members[to]]
            name = f"rank {source} to {to}, tag {tag}"
            self._messages[key] = self._log.channel(self.name, name, ends)
        return self._messages[key]
