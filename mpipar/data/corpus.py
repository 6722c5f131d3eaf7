"""Documents of a corpus, as streams of text pieces, so that size never meets memory.

Sources   "stdlib"   the .py files of the running Python's standard library, tests
                     left out
          folder     every text file below it; names that begin with a dot are left
                     out, and so are binary files (a zero byte in the first 8 KiB)
          .jsonl     each line a record whose field "text" is a document
          else       one text file, one document
Order     files of a folder come in the order of a hash of their relative path, so
          that the end of the corpus is as mixed as the rest and can be held out
Text      UTF-8; bytes that are not become U+FFFD. CRLF and a lone CR become LF.
          U+FEFF (the byte order mark) and U+0000 are dropped wherever they stand.
          Documents of no characters are skipped
Errors    DataError naming the path that is missing, dangling, unreadable, of the
          wrong kind, or the line that is not a record
"""

import hashlib
import json
import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TextIO

from mpipar.comm import file_work, moved
from mpipar.errors import DataError

PIECE_CHARS = 1 << 20
_SNIFFED_BYTES = 8192
_NOT_LIBRARY = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
)


def documents(source: str) -> Iterator[Iterator[str]]:
    """Yield each document as an iterator over its pieces of text, none empty.

    A document must be used up before the next one is asked for. Pieces hold about
    1 Mi characters and end after a newline where they have one; only a JSONL record
    is held whole.
    """
    for pieces in chain.from_iterable(map(_file_documents, _files(source))):
        solid = filter(None, map(_clean, pieces))
        first = next(solid, None)
        if first is not None:
            yield chain((first,), solid)


def check_file(path: str, kind: str) -> None:
    """Refuse, by name, a path that is not a readable regular file."""
    moved()
    if os.path.islink(path) and not os.path.exists(path):
        raise DataError(f"{path}: dangling symbolic link to {os.readlink(path)}")
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise DataError(f"{path}: is a folder, not a {kind}")
        # Opening a pipe would wait for a writer for ever
        if not stat.S_ISREG(mode):
            raise DataError(f"{path}: is not a regular file")
        with open(path, "rb"):
            pass
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _files(source: str) -> Iterable[str]:
    if source == "stdlib":
        return _library_files()
    if os.path.isdir(source):
        return _folder_files(source)
    check_file(source, "text file")
    if _is_binary(source):
        raise DataError(
            f"{source}: is not UTF-8 text, it holds zero bytes; "
            "convert it, or give token ids as a .npy file"
        )
    return (source,)


def _library_files() -> list[str]:
    root = sysconfig.get_path("stdlib")
    names = (
        name
        for name in _walk(root, _NOT_LIBRARY)
        if name.endswith(".py") and os.path.isfile(os.path.join(root, name))
    )
    files = _mixed(root, names)
    if not files:
        raise DataError(f"{root}: this Python has no library source files")
    return files


def _folder_files(root: str) -> list[str]:
    files = _mixed(root, (name for name in _walk(root) if not _is_hidden(name)))
    for path in files:
        check_file(path, "text file")
    texts = [path for path in files if not _is_binary(path)]
    if not texts:
        raise DataError(f"{root}: the folder holds no text file")
    return texts


def _walk(root: str, left_out: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield the relative paths of all files below root; links are not followed."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}") from error

    for folder, below, names in os.walk(root, onerror=refuse):
        below[:] = [name for name in below if name not in left_out]
        inside = os.path.relpath(folder, root)
        yield from (os.path.normpath(os.path.join(inside, name)) for name in names)


def _mixed(root: str, names: Iterable[str]) -> list[str]:
    def place(name: str) -> tuple[bytes, bytes]:
        path = os.fsencode(name)
        return hashlib.sha256(path).digest(), path

    return [os.path.join(root, name) for name in sorted(names, key=place)]


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split(os.sep))


def _is_binary(path: str) -> bool:
    with open(path, "rb") as file:
        return b"\0" in file.read(_SNIFFED_BYTES)


def _file_documents(path: str) -> Iterator[Iterable[str]]:
    # Universal newlines: the reader turns CRLF and CR into LF across its chunks
    options = {"encoding": "utf-8", "errors": "replace", "newline": None}
    with file_work("reading", path), open(path, **options) as file:
        if path.endswith(".jsonl"):
            for number, line in enumerate(file, start=1):
                line = line.replace("\ufeff", "").strip()
                if line:
                    yield _slices(_record_text(line, f"{path}, line {number}"))
        else:
            yield _pieces(file)


def _pieces(file: TextIO) -> Iterator[str]:
    left = ""
    while chunk := file.read(PIECE_CHARS):
        text = left + chunk
        cut = text.rfind("\n") + 1 or len(text)
        left = text[cut:]
        yield text[:cut]
    yield left


def _record_text(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not a JSON record: {error}") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{where}: the record has no field "text" that is a string')
    # Escapes in JSON can spell newlines of any form and halves of a character
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.encode("utf-8", "replace").decode("utf-8")


def _slices(text: str) -> Iterator[str]:
    for start in range(0, len(text), PIECE_CHARS):
        yield text[start : start + PIECE_CHARS]


def _clean(text: str) -> str:
    return text.replace("\ufeff", "").replace("\0", "")
