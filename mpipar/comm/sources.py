"""Where a thread is in the program, as file:line."""

import sys
import sysconfig
import threading
from pathlib import Path

_ROOM = str(Path(__file__).parent)
_LIBRARY = (sysconfig.get_path("stdlib"), "<")


def source_line(thread: int) -> str:
    """Return file:line where a thread is: the first frame outside of this room and of
    the standard library, in which everybody waits."""
    frame = sys._current_frames().get(thread)
    while frame is not None and _is_common(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "unknown"


def own_line() -> str:
    """Return the source line of the caller's thread."""
    return source_line(threading.get_ident())


def _is_common(file: str) -> bool:
    library = file.startswith(_LIBRARY) and "-packages" not in file
    return library or file.startswith(_ROOM)
