"""What a run leaves behind, and what it refuses: folders, exit codes, messages."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from faults.run import mpipar, start, write_recipe

from mpipar.checkpoint import is_complete
from mpipar.config import read_recipe, to_toml

OPTIONS = ("checkpoint.every=2", "train.eval_every=3")
WRONG = ("model.heads=3", "train.micro_batch=7", "optimizer.lr=-1", "model.colour=red")


class Finished:
    """A run that has ended well."""

    def __init__(self, folder: Path, tensor: int) -> None:
        self.folder, self.tensor = folder / f"tp{tensor}", tensor
        recipe = write_recipe(folder)
        words = (*OPTIONS, f"parallel.tensor={tensor}", "--out", self.folder)
        self.job = mpipar(tensor, "train", recipe, *words)
        assert (self.job.status, self.job.left) == (0, []), self.job.output

    @property
    def lines(self) -> list[dict]:
        text = (self.folder / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def weights(self, step: int) -> dict[str, np.ndarray]:
        found = {}

        def note(name: str, item: object) -> None:
            if isinstance(item, h5py.Dataset):
                found[name] = item[()]

        folder = self.folder / "checkpoints" / f"step_{step:08d}"
        with h5py.File(folder / "model.h5") as file:
            file.visititems(note)
        return found


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def run(request: pytest.FixtureRequest, finished: dict[int, Finished]) -> Finished:
    return finished[request.param]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Finished]:
    return {n: Finished(tmp_path_factory.mktemp("run"), n) for n in (1, 2)}


def files(folder: Path) -> dict[str, bytes]:
    """Contents of everything below a folder."""
    found = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in found}


def test_a_run_leaves_these_files(run: Finished) -> None:
    shards = [f"shard_{rank:05d}.h5" for rank in range(run.tensor)]
    each = ["manifest.json", "model.h5", "optimizer.h5", *shards]
    steps = [f"checkpoints/step_{n:08d}/{name}" for n in (2, 4, 6) for name in each]
    names = ["checkpoints/latest", *steps, "metrics.jsonl", "recipe.toml"]
    assert sorted(files(run.folder)) == [*names, "summary.json"]
    latest = (run.folder / "checkpoints" / "latest").read_text()
    assert latest.strip() == "step_00000006"
    for folder in (run.folder / "checkpoints").glob("step_*"):
        assert is_complete(folder)
        assert f"saved {folder}: " in run.job.output


def test_the_written_recipe_means_the_same_run(run: Finished) -> None:
    text = (run.folder / "recipe.toml").read_text()
    again = read_recipe(text, ranks=run.tensor)
    assert to_toml(again) == text
    assert again.model.ffn == 64 and again.model.vocab == 256
    assert again.parallel.tensor == run.tensor and again.parallel.data == 1


def test_metrics_has_a_whole_line_for_every_step(run: Finished) -> None:
    numbers = "loss grad_norm lr seconds tokens_per_second mfu"
    for step, line in enumerate(run.lines, 1):
        assert line["step"] == step and line["bubble"] == 0.0
        assert line["tokens"] == step * 4 * 16
        assert all(line[name] > 0 for name in numbers.split()), line
        assert line["tokens_per_second"] == pytest.approx(64 / line["seconds"])
        memory = line["memory"]
        assert memory.pop("rss_peak") > 1 << 20
        # What a save in the background has copied; a small state is written at once.
        assert memory.pop("snapshot") <= memory["params"] + memory["optimizer"]
        assert memory == line["memory_predicted"]
        assert memory.pop("unit_buffers") == memory.pop("masters") == 0
        assert line["loss_scale"] == 1.0
        held = "params grads optimizer activations_peak"
        assert sorted(memory) == sorted(held.split())
        assert all(isinstance(n, int) and n > 0 for n in memory.values())
    assert len(run.lines) == 6
    evaluated = [line["step"] for line in run.lines if "validation_loss" in line]
    assert evaluated == [3, 6]


def test_metrics_counts_what_moved(finished: dict[int, Finished]) -> None:
    assert all(line["comm"] == {} for line in finished[1].lines)
    for line in finished[2].lines:
        assert set(line["comm"]) == {"tp", "world"}
        for operations in line["comm"].values():
            for tally in operations.values():
                assert sorted(tally) == ["bytes", "calls", "seconds", "wait"]
                assert tally["calls"] > 0 and tally["bytes"] > 0
                assert 0 <= tally["wait"] <= tally["seconds"] <= line["seconds"]
    # Evaluation and saving belong to no step.
    moved = [
        [(a, op, t["calls"], t["bytes"]) for a, ops in line["comm"].items()
         for op, t in ops.items()]
        for line in finished[2].lines
    ]  # fmt: skip
    assert all(line == moved[0] for line in moved)


def test_summary_says_how_the_run_ended(run: Finished) -> None:
    summary = json.loads((run.folder / "summary.json").read_text())
    last = run.lines[-1]
    assert summary["steps"] == 6 and summary["stopped"] is False
    assert summary["loss"] == last["loss"] and summary["tokens"] == last["tokens"]
    assert summary["validation_loss"] == last["validation_loss"]
    assert summary["layout"] == {"tp": run.tensor, "cp": 1, "dp": 1, "pp": 1}
    assert summary["ranks"] == run.tensor and summary["seconds"] > 0
    saves, folder = summary["saves"], run.folder / "checkpoints" / "step_00000006"
    held = sum(f.stat().st_size for f in folder.iterdir())
    assert saves["count"] == 3 and saves["bytes"] == held
    assert 0 < saves["exposed_seconds"] and 0 < saves["seconds"] < summary["seconds"]
    assert isinstance(saves["advised_every"], int) and saves["advised_every"] >= 1


def test_both_layouts_train_alike(finished: dict[int, Finished]) -> None:
    one, two = (finished[n].lines for n in (1, 2))
    for name in ("loss", "grad_norm"):
        values = [line[name] for line in one]
        assert [line[name] for line in two] == pytest.approx(values, rel=1e-10)


def test_any_hdf5_tool_reads_the_weights(run: Finished) -> None:
    folder = run.folder / "checkpoints" / "step_00000006"
    with h5py.File(folder / "model.h5") as file:
        assert file["blocks/0/attention/q/weight"].shape == (16, 16)
        assert file["embedding/token/weight"].shape == (256, 16)
        assert file.attrs["step"] == 6
        assert file.attrs["recipe"] == (run.folder / "recipe.toml").read_text()
    with h5py.File(folder / "optimizer.h5") as file:
        assert file["m/blocks/0/attention/q/weight"].shape == (16, 16)
        assert file["v/embedding/token/weight"][()].min() >= 0


def test_the_weights_do_not_show_the_layout(finished: dict[int, Finished]) -> None:
    one, two = finished[1].weights(6), finished[2].weights(6)
    assert list(one) == list(two)
    for name, array in one.items():
        assert two[name].dtype == array.dtype == np.float64
        error = np.linalg.norm(two[name] - array)
        assert error <= 1e-10 * max(np.linalg.norm(array), 1.0), name


def test_a_folder_with_a_run_is_refused_and_untouched(run: Finished) -> None:
    before = files(run.folder)
    recipe = run.folder.parent / "recipe.toml"
    words = (f"parallel.tensor={run.tensor}", "--out", run.folder)
    again = mpipar(run.tensor, "train", recipe, *words)
    assert again.status == 2 and again.left == []
    assert again.output.count("already holds a run") == 1
    assert str(run.folder) in again.output
    assert files(run.folder) == before


@pytest.mark.parametrize(
    "n", [1, 2, pytest.param(4, marks=pytest.mark.full), 8], ids="{} ranks".format
)
def test_a_wrong_recipe_is_refused_by_all_at_once(tmp_path: Path, n: int) -> None:
    recipe = write_recipe(tmp_path)
    before = files(tmp_path)
    with start(n, "train", recipe, *WRONG, note=True, cwd=tmp_path) as run:
        job = run.job.result()
        assert run.all_ended_with(2, n), job.output
    assert (job.status, job.late, job.left) == (2, False, [])
    assert job.output.count("mpipar: the recipe has") == 1
    assert job.output.count("\n  - ") == len(WRONG)
    assert all(word.partition("=")[0] in job.output for word in WRONG)
    assert "Traceback" not in job.output
    assert files(tmp_path) == before


@pytest.mark.parametrize("below", [False, True], ids=["a file", "below a file"])
def test_a_run_folder_that_cannot_be_is_refused(tmp_path: Path, below: bool) -> None:
    """A25"""
    recipe = write_recipe(tmp_path)
    blocked = tmp_path / "blocked"
    blocked.write_text("mine")
    out = blocked / "run" if below else blocked
    with start(2, "train", recipe, "--out", out, note=True) as run:
        job = run.job.result()
        assert run.all_ended_with(2, 2), job.output
    assert (job.status, job.late, job.left) == (2, False, [])
    assert job.output.count(f"cannot write the run folder {out}") == 1
    assert "Traceback" not in job.output
    assert blocked.read_text() == "mine"


def test_a_measurement_that_could_not_be_written_does_not_begin(tmp_path: Path) -> None:
    command = ("bench", "context", "--json", "none/x.json", "--rounds", "1000000")
    with start(2, *command, cwd=tmp_path, note=True) as run:
        job = run.job.result()
        assert run.all_ended_with(2, 2), job.output
    assert (job.status, job.late, job.left) == (2, False, [])
    assert job.output.count("cannot write --json none/x.json: ") == 1
    assert "Traceback" not in job.output and files(tmp_path) == {}


def test_an_unknown_recipe_names_the_nearest_presets(tmp_path: Path) -> None:
    job = mpipar(2, "train", "tinny", cwd=tmp_path)
    assert job.status == 2 and job.left == []
    assert job.output.count("did you mean tiny") == 1
    assert "gpt2-124m" in job.output and "Traceback" not in job.output
    assert files(tmp_path) == {}


def bad_source(folder: Path, case: str) -> tuple[Path, list[str]]:
    """A source that must be refused, and words of the refusal."""
    path = folder / ("ids.npy" if case == "large id" else "text.txt")
    words = [str(path)]
    if case == "dangling":
        path.symlink_to(folder / "nowhere")
        words += ["nowhere"]
    if case == "short":
        path.write_text("fifteen bytes..")
        words += ["16", "17"]
    if case == "large id":
        ids = np.arange(2000, dtype=np.uint16) % 101
        ids[1234] = 101
        np.save(path, ids)
        words += ["101", "1234"]
    return path, words


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("case", ["missing", "dangling", "large id", "short"])
def test_bad_data_is_refused_before_training(tmp_path: Path, case: str, n: int) -> None:
    """A51 A52"""
    recipe = write_recipe(tmp_path)
    source, said = bad_source(tmp_path, case)
    words = [f"data.source={source}", "model.vocab=101", "--out", tmp_path / "run"]
    if case != "large id":
        words[1] = "data.validation=0"
    with start(n, "train", recipe, *words, note=True) as run:
        job = run.job.result()
        assert run.all_ended_with(2, n), job.output
    assert (job.status, job.late, job.left) == (2, False, [])
    assert job.output.count("mpipar: ") == 1 and "Traceback" not in job.output
    assert all(word in job.output for word in said)
    assert "step 1/" not in job.output


@pytest.mark.parametrize("n", [1, 2])
def test_a_missing_tokenizer_is_refused_by_all(tmp_path: Path, n: int) -> None:
    recipe = write_recipe(tmp_path)
    words = ("data.tokenizer=none.json", "--out", tmp_path / "run")
    job = mpipar(n, "train", recipe, *words)
    assert (job.status, job.left) == (2, []), job.output
    assert job.output.count("mpipar: ") == 1 and "Traceback" not in job.output
    assert "none.json" in job.output


def test_after_bad_data_the_same_folder_can_be_used(tmp_path: Path) -> None:
    recipe, out = write_recipe(tmp_path), tmp_path / "run"
    first = mpipar(0, "train", recipe, "data.source=none.txt", "--out", out)
    second = mpipar(0, "train", recipe, "train.steps=1", "--out", out)
    assert (first.status, second.status) == (2, 0), second.output


def generated(n: int, *words: object, **env: str) -> str:
    """What generation prints; it must end well."""
    job = mpipar(n, "generate", *words, **env)
    assert (job.status, job.late, job.left) == (0, False, []), job.output
    return job.output


def test_generation_does_not_show_the_ranks(finished: dict[int, Finished]) -> None:
    folder = finished[2].folder
    words = (folder, "--prompt", "4", "--tokens", 14, "--seed", 3)
    alone = generated(1, *words)
    assert alone.startswith("4") and len(alone) > 8
    assert generated(2, *words) == alone
    # From the checkpoint of the other layout, given by its folder.
    other = finished[1].folder / "checkpoints" / "step_00000006"
    assert generated(2, other, *words[1:], "--temperature", 0) == generated(
        1, folder, *words[1:], "--temperature", 0
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tokens=-1", "--top-k=-2", "--temperature=-0.5"], "3 problems"),
        (["model.heads=4", "parallel.tensor=x"], "parallel.tensor"),
        (["--prompt", "x" * 17], "17 tokens"),
    ],
    ids=["negative", "override", "long prompt"],
)
def test_generation_refuses_what_it_cannot_do(
    finished: dict[int, Finished], words: list[str], said: str
) -> None:
    folder = finished[1].folder
    with start(2, "generate", folder, "--prompt", "1", *words, note=True) as run:
        job = run.job.result()
        assert run.all_ended_with(2, 2), job.output
    assert job.status == 2 and job.left == []
    assert job.output.count("mpipar: ") == 1 and said in job.output
    assert "Traceback" not in job.output


@pytest.mark.parametrize("case", ["missing", "damaged"])
@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_checkpoint_of_no_use_is_refused(tmp_path: Path, case: str, n: int) -> None:
    file = tmp_path / "manifest.json"
    if case == "damaged":
        file.write_bytes(b'{"checksum":"' + bytes(1000))
    # A path that leads nowhere is a wrong command, a damaged file is not.
    status = 2 if case == "missing" else 4
    with start(n, "generate", file, "--prompt", "x", note=True) as run:
        job = run.job.result()
        assert run.all_ended_with(status, n), job.output
    assert job.status == status and job.left == []
    assert job.output.count("mpipar: ") == 1 and str(file) in job.output
    assert "Traceback" not in job.output


@pytest.mark.parametrize(
    "encoding",
    ["ascii", *(pytest.param(e, marks=pytest.mark.full) for e in ("latin-1", "utf-8"))],
)
def test_text_reaches_a_terminal_of_any_encoding(
    finished: dict[int, Finished], encoding: str
) -> None:
    # An undecodable byte in the command line arrives as a lone surrogate.
    words = ("--prompt", "\udcff €", "--tokens", 5)
    output = generated(0, finished[1].folder, *words, PYTHONIOENCODING=encoding)
    assert len(output) > 3


@pytest.mark.full
def test_eight_ranks_train_tiny_in_a_minute(tmp_path: Path) -> None:
    """A34"""
    words = ("parallel.tensor=2", "train.eval_samples=16", "--out", tmp_path / "run")
    job = mpipar(8, "train", "tiny", *words, timeout=60, OMP_NUM_THREADS=None)
    assert (job.status, job.late, job.left) == (0, False, []), job.output
