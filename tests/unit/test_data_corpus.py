"""Documents of every kind of source, and what is refused."""

import json
import os
import tracemalloc

import pytest

from mpipar.data import ByteTokenizer, documents, read_ids
from mpipar.data.corpus import PIECE_CHARS
from mpipar.errors import DataError

BOM = b"\xef\xbb\xbf"
FORMS = {
    "LF": lambda text: text,
    "CRLF": lambda text: text.replace(b"\n", b"\r\n"),
    "CR": lambda text: text.replace(b"\n", b"\r"),
    "BOM+LF": lambda text: BOM + text,
    "BOM+CRLF": lambda text: BOM + text.replace(b"\n", b"\r\n"),
    "two BOMs": lambda text: BOM + BOM + text,
}


def texts(source):
    return ["".join(document) for document in documents(str(source))]


@pytest.mark.parametrize("form", FORMS)
def test_text_is_the_same_in_every_newline_form(tmp_path, form):
    """A53: a BOM is never tokenised, CRLF and CR become LF."""
    path = tmp_path / "text.txt"
    path.write_bytes(FORMS[form]("eins\n\nzwei ü\n".encode()))
    assert texts(path) == ["eins\n\nzwei ü\n"]
    ids = read_ids(str(path), ByteTokenizer(), 256)
    assert ids.tobytes() == "eins\n\nzwei ü\n\0".encode()


@pytest.mark.parametrize("final", [b"\n", b""], ids=["newline", "no newline"])
@pytest.mark.parametrize("form", FORMS)
def test_records_are_the_same_in_every_newline_form(tmp_path, form, final):
    """A53: no record is lost or gained; blank lines are none."""
    path = tmp_path / "text.jsonl"
    lines = '{"text": "first"}\n{"text": "b\\r\\nc\\rd"}\n\n{"text": "last \u2028"}'
    path.write_bytes(FORMS[form](lines.encode() + final))
    assert texts(path) == ["first", "b\nc\nd", "last \u2028"]


def test_crlf_across_a_chunk_boundary_is_one_newline(tmp_path):
    """A53: however the file falls into chunks."""
    path = tmp_path / "text.txt"
    for shift in range(4):
        path.write_bytes(b"x" * (PIECE_CHARS - 2 + shift) + b"\r\ny" * 3 + b"\r\n")
        assert texts(path)[0].endswith("x" + "\ny" * 3 + "\n")


def test_a_huge_single_line_is_read_in_bounded_memory(tmp_path):
    """A53: 50 MB without a newline cost the ids and a few pieces, never the text."""
    path = tmp_path / "line.txt"
    megabytes = 50
    with open(path, "wb") as file:
        for _ in range(megabytes):
            file.write(b"0123456789abcdef" * (1 << 16))
    tracemalloc.start()
    ids = read_ids(str(path), ByteTokenizer(), 256)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ids.size == (megabytes << 20) + 1
    assert ids[:16].tobytes() == b"0123456789abcdef"
    # The array grows by an eighth at a time; pieces take a few MiB
    assert peak < 1.125 * ids.nbytes + (12 << 20)


def test_bytes_that_are_not_utf8_are_replaced(tmp_path):
    path = tmp_path / "latin1.py"
    path.write_bytes("# café\n".encode("latin-1"))
    assert texts(path) == ["# caf\ufffd\n"]


def test_zero_bytes_and_halves_of_characters_never_reach_the_tokens(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "a\\u0000b \\ud800 \\ufeffc"}\n')
    assert texts(path) == ["ab ? c"]


def test_empty_documents_are_skipped(tmp_path):
    """A51: in the middle, made of nothing but a mark, and as files of a folder."""
    path = tmp_path / "text.jsonl"
    lines = [{"text": t} for t in ("a", "", "\ufeff", "b")]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert texts(path) == ["a", "b"]
    assert read_ids(str(path), ByteTokenizer(), 256).tobytes() == b"a\0b\0"
    (tmp_path / "empty.txt").write_bytes(BOM)
    assert sorted(texts(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not a JSON record"),
        ("[1]", 'no field "text"'),
        ('{"txt": "a"}', 'no field "text"'),
        ('{"text": 3}', 'no field "text"'),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path, line, what):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "a"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=f"text.jsonl, line 3: .*{what}"):
        texts(path)


def test_a_folder_gives_its_text_files_in_an_order_of_names_alone(tmp_path):
    for root in (tmp_path / "one", tmp_path / "two"):
        (root / "sub" / ".git").mkdir(parents=True)
        for i in range(20):
            (root / "sub" / f"{i:02}.txt").write_text(f"text {i}")
        (root / "top.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
        (root / "sub" / ".git" / "config").write_text("hidden")
        (root / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "two").rename(tmp_path / "elsewhere")
    found = texts(tmp_path / "one")
    assert found == texts(tmp_path / "elsewhere")
    assert sorted(found) == sorted(["a", "b", *(f"text {i}" for i in range(20))])
    numbers = [f for f in found if f.startswith("text")]
    assert numbers != sorted(numbers)


def test_the_standard_library_is_a_corpus_without_tests():
    ids = read_ids("stdlib", ByteTokenizer(), 256)
    text = ids.tobytes()
    assert 5e6 < ids.size < 60e6
    assert b"class JSONDecoder" in text
    assert b"\r" not in text
    assert b"def skip_if_broken_multiprocessing_synchronize" not in text


def refused(path, what, name=None):
    with pytest.raises(DataError, match=what) as caught:
        texts(path)
    assert str(name or path) in str(caught.value)


def test_paths_that_are_no_source_are_refused_by_name(tmp_path):
    """A51: missing, dangling, a pipe, binary, an empty folder, a link inside one."""
    refused(tmp_path / "missing.txt", "No such file")
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone")
    refused(tmp_path / "link.txt", "dangling symbolic link to .*gone")
    refused(tmp_path, "dangling", name="link.txt")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file" / "below.txt", "Not a directory")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "not a regular file")
    (tmp_path / "wide.txt").write_bytes("text".encode("utf-16"))
    refused(tmp_path / "wide.txt", "not UTF-8 text")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "holds no text file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_or_folder_is_refused_by_name(tmp_path):
    """A51."""
    inside = tmp_path / "inside"
    inside.mkdir()
    secret = inside / "secret.txt"
    secret.write_text("x")
    secret.chmod(0)
    refused(secret, "Permission denied")
    refused(inside, "Permission denied", name=secret)
    inside.chmod(0)
    refused(inside, "Permission denied")
    inside.chmod(0o700)
