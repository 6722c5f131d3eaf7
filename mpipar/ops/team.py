"""Threads that share the rows of an array operation.

BLAS and kernels release the interpreter lock, so plain threads do. Each part is worked
on by one thread from start to end; results do not depend on timing.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

# Waking a thread and waiting for it takes as long as a pass over so many numbers.
WORTHWHILE = 1 << 16
# A core makes so many multiply-adds in the time that a pass takes for one number.
MULTIPLY_ADDS = 32


class Team:
    """`size` threads, the calling one among them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._work: list[SimpleQueue] = []
        self._done: SimpleQueue = SimpleQueue()
        for number in range(1, size):
            queue: SimpleQueue = SimpleQueue()
            name = f"mpipar-ops-{number}"
            thread = threading.Thread(target=self._serve, args=(queue,), name=name)
            thread.daemon = True
            thread.start()
            self._work.append(queue)

    def share(
        self, items: int, work: Callable[[int, int, int], Any], numbers: int
    ) -> None:
        """Calls work(lo, hi, thread) so that the parts lo .. hi cover 0 .. items.

        numbers   about how many numbers are worked on in one pass: a few are not worth
                  waking anybody
        Raises    what a part raises, after all have ended
        """
        if self.size == 1 or items < 2 or numbers < WORTHWHILE:
            work(0, items, 0)
            return
        cuts = [items * i // self.size for i in range(self.size + 1)]
        for number, queue in enumerate(self._work, start=1):
            queue.put((work, cuts[number], cuts[number + 1], number))
        error = _attempt(work, cuts[0], cuts[1], 0)
        for _ in self._work:
            error = self._done.get() or error
        if error is not None:
            raise error

    def _serve(self, queue: SimpleQueue) -> None:
        while True:
            self._done.put(_attempt(*queue.get()))


def _attempt(work: Callable, lo: int, hi: int, thread: int) -> BaseException | None:
    try:
        work(lo, hi, thread)
    except BaseException as error:
        return error
    return None
