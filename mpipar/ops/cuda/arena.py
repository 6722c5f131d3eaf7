"""Where arrays lie in device memory: blocks of few large reservations.

Nothing here touches a device. The same sequence of requests gives the same addresses,
so that each step finds its arrays where the one before had them, and asks the driver
for nothing.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

ALIGNMENT = 512  # bytes, as cudaMalloc's
# Bytes of the smallest reservation, of the largest one of which less is needed, and of
# what all are rounded up to. Libraries want memory of their own besides.
SMALLEST, LARGEST, GRANULE = 64 << 20, 1 << 30, 2 << 20


def rounded(size: int, multiple: int = ALIGNMENT) -> int:
    """The next multiple; at least one."""
    return max(multiple, -(-size // multiple) * multiple)


class Arena:
    """Blocks that are used by the work of one stream.

    A block that is given back may be taken again at once: the stream runs its work in
    order. Taken is the smallest free block that is large enough, of equal ones the one
    at the lowest address; neighbours that are free become one.

    reserve   gets so many bytes at an address; raises MemoryError where it cannot
    least     bytes of the smallest reservation
    now       bytes in use;  peak  the most since `reset_peak`;  reserved  bytes in all
    """

    def __init__(self, reserve: Callable[[int], int], least: int = SMALLEST) -> None:
        self.reserve, self.least = reserve, least
        self.now = self.peak = self.reserved = 0
        # Size of each reservation and of each block in use, by address
        self.segments: dict[int, int] = {}
        self._used: dict[int, int] = {}
        # Free blocks: sorted (size, address); size by address; address by end
        self._free: list[tuple[int, int]] = []
        self._sizes: dict[int, int] = {}
        self._ends: dict[int, int] = {}

    def __contains__(self, address: int) -> bool:
        return address in self._used

    def take(self, size: int) -> int:
        """The address of at least `size` bytes.   Raises MemoryError"""
        size = rounded(size)
        place = bisect_left(self._free, (size, 0))
        if place == len(self._free):
            self._grow(size)
            place = bisect_left(self._free, (size, 0))
        found, address = self._free[place]
        self._remove(address)
        if found > size:
            self._add(address + size, found - size)
        self._used[address] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        return address

    def give(self, address: int) -> None:
        """Takes a block back.   Raises KeyError where it is not in use"""
        size = self._used.pop(address)
        self.now -= size
        end = address + size
        if end in self._sizes and end not in self.segments:
            size += self._remove(end)
        if address in self._ends and address not in self.segments:
            before = self._ends[address]
            size += self._remove(before)
            address = before
        self._add(address, size)

    def reset_peak(self) -> None:
        """From now on, `peak` is the most of what comes."""
        self.peak = self.now

    def spare(self) -> list[int]:
        """Forgets the reservations of which nothing is in use; their addresses."""
        found = [a for a, size in self.segments.items() if self._sizes.get(a) == size]
        for address in found:
            self._remove(address)
            self.reserved -= self.segments.pop(address)
        return found

    def _grow(self, size: int) -> None:
        """Reserves enough: more than that, so that reservations stay few and large."""
        need = rounded(size, GRANULE)
        ahead = min(LARGEST, rounded(self.reserved // 4, GRANULE))
        wanted = max(need, self.least, ahead)
        try:
            address = self.reserve(wanted)
        except MemoryError:
            if wanted == need:
                raise
            address, wanted = self.reserve(need), need
        self.segments[address] = wanted
        self.reserved += wanted
        self._add(address, wanted)

    def _add(self, address: int, size: int) -> None:
        insort(self._free, (size, address))
        self._sizes[address] = size
        self._ends[address + size] = address

    def _remove(self, address: int) -> int:
        size = self._sizes.pop(address)
        del self._ends[address + size]
        del self._free[bisect_left(self._free, (size, address))]
        return size


class Pool:
    """An arena for each stream, and for each recorded graph.

    A block belongs to the arena that it was taken from. Whoever uses it on another
    stream keeps it until its own stream has waited for that one.

    reserve, release   cudaMalloc and cudaFree: bytes → address, address → nothing
    stream             the number of the current stream
    limit              bytes that may be reserved in all; 0 = all that there are
    reservations       how often the driver was asked for memory
    """

    def __init__(
        self,
        reserve: Callable[[int], int],
        release: Callable[[int], None],
        stream: Callable[[], int],
        limit: Callable[[], int] = int,
    ) -> None:
        self._reserve, self._release, self._stream = reserve, release, stream
        self.limit, self.reservations, self.peak = limit, 0, 0
        self.arenas: dict[object, Arena] = {}
        self._inner: Arena | None = None
        self._owners: dict[int, Arena] = {}
        # Blocks that nobody holds any more. They are noted without a lock: a collection
        # of garbage may begin in the middle of `malloc`.
        self._returned: deque[int] = deque()
        self._lock = threading.Lock()

    @property
    def now(self) -> int:
        """Bytes in use."""
        with self._lock:
            self._settle()
            return self._in_use()

    @property
    def reserved(self) -> int:
        """Bytes that the driver has given."""
        return sum(arena.reserved for arena in self.arenas.values())

    def malloc(self, size: int, device: int = 0) -> int:
        """A block of the current stream's arena.   Raises MemoryError"""
        with self._lock:
            self._settle()
            arena = self._inner or self._arena(self._stream())
            address = arena.take(size)
            self._owners[address] = arena
            self.peak = max(self.peak, self._in_use())
            return address

    def free(self, address: int, device: int = 0) -> None:
        """Takes a block back."""
        self._returned.append(address)

    def reset_peak(self) -> None:
        """From now on, `peak` is the most of what comes."""
        self.peak = self.now

    def inner(self) -> Arena:
        """An arena whose memory comes from the current stream's and stays its own."""
        arena = self._arena(self._stream())
        return Arena(arena.take, GRANULE)

    def use(self, inner: Arena | None) -> None:
        """From now on, blocks come from an inner arena; None = the streams' again."""
        with self._lock:
            self._settle()
            self._inner = inner

    def drop(self, inner: Arena) -> None:
        """Gives the memory of an inner arena back, of which nothing is in use."""
        with self._lock:
            self._settle()
            outer = self._arena(self._stream())
            for address in inner.spare():
                outer.give(address)

    def base_of(self, address: int) -> tuple[int, int]:
        """Address and size of the cudaMalloc that an address lies in, as another
        process must open it."""
        for arena in self.arenas.values():
            for base, size in arena.segments.items():
                if base <= address < base + size:
                    return base, size
        raise KeyError(address)

    def _in_use(self) -> int:
        return sum(arena.now for arena in self.arenas.values())

    def _arena(self, stream: int) -> Arena:
        if stream not in self.arenas:
            self.arenas[stream] = Arena(self._more)
        return self.arenas[stream]

    def _settle(self) -> None:
        while self._returned:
            address = self._returned.popleft()
            self._owners.pop(address).give(address)

    def _more(self, size: int) -> int:
        """A reservation; unused ones are given back where there is no room."""
        limit = self.limit()
        if not limit or self.reserved + size <= limit:
            try:
                return self._asked(size)
            except MemoryError:
                pass
        for arena in self.arenas.values():
            for address in arena.spare():
                self._release(address)
        if limit and self.reserved + size > limit:
            raise MemoryError(f"{limit:,} bytes may be reserved")
        return self._asked(size)

    def _asked(self, size: int) -> int:
        address = self._reserve(size)
        self.reservations += 1
        return address
