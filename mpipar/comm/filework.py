"""What the threads of this process do with files, noted for the watchdog to tell.

A file system that does not answer keeps the thread that asked. So whoever reads or
writes says so first, ``with file_work("writing", path):``, and the watchdog's thread
reads it here. A note costs some microseconds; time counts from the last sign of
progress: a big file is no stall.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True, eq=False)
class FileWork:
    """One thing done with a file; ``since`` when it began, or last moved."""

    verb: str
    path: Path | str
    thread: int
    since: float


# By thread, the innermost last
_works: dict[int, list[FileWork]] = {}
# When the main thread began to wait for other threads; None while it does not
_awaited_since: float | None = None


@contextmanager
def file_work(verb: str, path: Path | str) -> Iterator[None]:
    """The caller is busy with a file inside.

    verb    what it does, such as "writing"; path   absolute, or as a user gave it
    """
    thread = threading.get_ident()
    stack = _works.setdefault(thread, [])
    work = FileWork(verb, path, thread, time.perf_counter())
    stack.append(work)
    try:
        yield
    finally:
        # Not always the last: a generator may be closed later
        stack.remove(work)
        if stack:
            stack[-1].since = time.perf_counter()
        else:
            _works.pop(thread, None)


def moved() -> None:
    """The innermost work of this thread has got any further."""
    stack = _works.get(threading.get_ident())
    if stack:
        stack[-1].since = time.perf_counter()


@contextmanager
def awaited() -> Iterator[None]:
    """The main thread waits inside for what other threads do with files."""
    global _awaited_since
    before = _awaited_since
    if before is None:
        _awaited_since = time.perf_counter()
    try:
        yield
    finally:
        _awaited_since = before


def held_up(main: int) -> tuple[FileWork, float] | None:
    """What keeps thread ``main``, and since when: its own work, or the oldest of the
    threads it waits for. None if that is not a file.
    """
    for _ in range(3):
        try:
            works = [stack[-1] for stack in list(_works.values()) if stack]
            break
        except (RuntimeError, IndexError):  # it changed meanwhile: look again
            continue
    else:
        return None
    own = [work for work in works if work.thread == main]
    begun = _awaited_since
    if own:
        return own[0], own[0].since
    if begun is None or not works:
        return None
    oldest = min(works, key=lambda work: work.since)
    return oldest, max(oldest.since, begun)
