"""The house rules: who imports whom, how long things are, what has a docstring."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE_LINES, FUNCTION_LINES = 400, 60
SOURCES = sorted(
    file for room in ("mpipar", "models") for file in (ROOT / room).rglob("*.py")
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def run_tool(name: str, *words: str, cwd: Path) -> subprocess.CompletedProcess:
    """Run a tool installed beside this Python."""
    command = [str(Path(sys.executable).with_name(name)), *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def definitions(file: Path) -> Iterator[Definition]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, Definition):
            yield node


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """The package as it is installed: mpipar.models inside mpipar."""
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mpipar", tmp_path / "mpipar", ignore=skip)
    shutil.copytree(ROOT / "models", tmp_path / "mpipar" / "models", ignore=skip)
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    return tmp_path


def check_imports(house: Path) -> subprocess.CompletedProcess:
    return run_tool("lint-imports", "setup.cfg", "--no-cache", cwd=house)


def test_rooms_import_downwards_only(house: Path) -> None:
    result = check_imports(house)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("room", "line", "contract"),
    [
        ("layers", "import mpipar.grid", "rooms import downwards only"),
        ("checkpoint", "import mpipar.data", "rooms import downwards only"),
        ("data", "from mpi4py import MPI", "only grid, comm and cli touch mpi4py"),
        ("layers", "import cupy", "only ops and comm import cupy"),
        ("train", "import h5py", "only checkpoint and data import h5py"),
    ],
)
def test_a_wrong_import_is_caught(
    house: Path, room: str, line: str, contract: str
) -> None:
    (house / "mpipar" / room / "stray.py").write_text(f"{line}\n")
    result = check_imports(house)
    assert result.returncode == 1
    assert f"{contract} BROKEN" in result.stdout


IMPORT_ALL = """
import importlib, pkgutil, sys, mpipar
for module in pkgutil.walk_packages(mpipar.__path__, "mpipar."):
    if module.name in ("mpipar.__main__", "mpipar.cli.world"):
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        assert error.name in ("jax", "torch"), error
    assert "mpi4py.MPI" not in sys.modules, module.name
"""


def test_no_module_starts_mpi_by_being_imported() -> None:
    """Worker processes and the commands of one process import them too."""
    command = [sys.executable, "-c", IMPORT_ALL]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_ruff_has_no_complaint() -> None:
    result = run_tool("ruff", "check", "--no-cache", "--quiet", ".", cwd=ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "file", SOURCES + TESTS, ids=lambda f: str(f.relative_to(ROOT))
)
def test_files_and_functions_stay_short(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= FILE_LINES
    long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in definitions(file)
        if not isinstance(node, ast.ClassDef)
    }
    assert {n: k for n, k in long.items() if k > FUNCTION_LINES} == {}


@pytest.mark.parametrize("file", SOURCES, ids=name)
def test_public_names_have_docstrings(file: Path) -> None:
    module = ast.parse(file.read_text(encoding="utf-8"))
    bare = [
        node.name
        for node in module.body
        if isinstance(node, Definition)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert bare == []


UNSAFE = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "joblib",
          "cloudpickle", "yaml"}  # fmt: skip
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "load_module", "system"}


@pytest.mark.parametrize(
    "file", [f for f in SOURCES if f.parent.name == "checkpoint"], ids=name
)
def test_a_checkpoint_holds_no_program(file: Path) -> None:
    """Checkpoints come from strangers: nothing in them is unpickled or evaluated."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not UNSAFE & {a.name.partition(".")[0] for a in node.names}
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in UNSAFE
            assert not UNSAFE & {alias.name for alias in node.names}
        if isinstance(node, ast.Call):
            called = node.func
            word = getattr(called, "id", getattr(called, "attr", ""))
            assert word not in UNSAFE_CALLS or ast.unparse(called) == "re.compile"
            assert not {"allow_pickle"} & {word.arg for word in node.keywords}
            # NumPy's own reader would unpickle.
            assert ast.unparse(called) not in ("np.load", "numpy.load", "np.loads")


def test_setup_names_every_package() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    folders = {file.parent.relative_to(ROOT) for file in SOURCES}
    names = {".".join(folder.parts) for folder in folders}
    names = {f"mpipar.{n}" if n.startswith("models") else n for n in names}
    assert set(setup["options"]["packages"].split()) == names
