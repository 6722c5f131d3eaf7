"""Files and folders that are on disk when we say so."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpipar.comm import file_work


def flush(path: Path) -> None:
    """Brings a file, or the names in a folder, to disk."""
    with file_work("flushing", path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """The file has this text, or what it had before, whatever happens meanwhile."""
    draft = path.with_name(path.name + ".tmp")
    with file_work("writing", draft):
        draft.write_text(text, encoding="utf-8")
    flush(draft)
    with file_work("renaming", draft):
        draft.replace(path)
    flush(path.parent)


class PatientFile:
    """A file for HDF5 to write that does not crash it when the disk is full.

    It keeps the first write error instead of raising it into HDF5, which does not
    survive that: it fails again whenever it flushes, and crashes the process at exit.
    So writes after an error are taken and dropped, and the error is raised by `close`,
    where it can be handled.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with file_work("opening", path):
            self._file = path.open("w+b", buffering=0)
        self._error: OSError | None = None

    def close(self, *, durable: bool = True) -> None:
        """Closes, on disk if `durable`; raises the first error that there was."""
        if durable:
            self._note(lambda: os.fsync(self._file.fileno()))
        self._file.close()
        if self._error is not None:
            raise self._error

    # What HDF5 calls

    def write(self, data: Any) -> int:
        """Writes all of `data`, however many calls that takes."""
        view = memoryview(data).cast("B")
        self._note(lambda: self._write_all(view))
        return view.nbytes

    def truncate(self, size: int) -> int:
        """Sets the file's size."""
        self._note(lambda: self._file.truncate(size))
        return size

    def flush(self) -> None:
        """Nothing is buffered here."""

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves the position."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """The position."""
        return self._file.tell()

    def read(self, size: int) -> bytes:
        """Up to `size` bytes from the position on."""
        return self._file.read(size)

    def _write_all(self, view: memoryview) -> None:
        while view.nbytes:
            view = view[self._file.write(view) :]

    def _note(self, action: Callable[[], Any]) -> None:
        if self._error is None:
            try:
                with file_work("writing", self._path):
                    action()
            except OSError as problem:
                self._error = problem
