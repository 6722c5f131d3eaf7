"""Parts of a run that need no run: progress, metrics, signals, the learning rate."""

import json
import math
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpipar.config import read_recipe
from mpipar.engine import StepResult
from mpipar.engine.learning_rate import learning_rate
from mpipar.grid import serial_grid
from mpipar.ops import Ops
from mpipar.train.metrics import Metrics, write_summary
from mpipar.train.progress import Bar, Lines, Silence, describe, make_progress
from mpipar.train.signals import StopSignals

LINE = {
    "step": 7, "loss": 2.5, "grad_norm": 0.75, "lr": 1e-3, "updated": True,
    "loss_scale": 1.0,
    "tokens_per_second": 12345.6, "mfu": 0.42,
}  # fmt: skip


def line(step: int, **changes: object) -> dict:
    return LINE | {"step": step} | changes


# --- progress -------------------------------------------------------------------------


def test_lines_shows_the_first_the_last_and_every_nth(
    capsys: pytest.CaptureFixture,
) -> None:
    lines = Lines(steps=23, every=10)
    lines.say("hello")
    for step in range(1, 24):
        lines.step(line(step))
    lines.close()
    said, *shown = capsys.readouterr().out.splitlines()
    assert said == "hello"
    assert [text.split()[1] for text in shown] == ["1/23", "10/23", "20/23", "23/23"]


def test_lines_shows_the_first_step_of_a_run_that_goes_on(
    capsys: pytest.CaptureFixture,
) -> None:
    lines = make_progress("lines", 23, 10, rank=0, begin=14)
    for step in range(15, 24):
        lines.step(line(step))
    shown = capsys.readouterr().out.splitlines()
    assert [text.split()[1] for text in shown] == ["15/23", "20/23", "23/23"]


def test_a_step_is_described_in_one_line() -> None:
    text = describe(line(7, validation_loss=3.25))
    for part in ("loss 2.5000", "norm 0.750", "lr 1.00e-03", "12,346 tok/s", "42%"):
        assert part in text
    assert "validation 3.2500" in text and "\n" not in text
    assert "skipped" in describe(line(7, updated=False, grad_norm=math.inf))
    assert "loss nan" in describe(line(7, loss=math.nan))


def test_the_bar_shows_steps_and_news(capsys: pytest.CaptureFixture) -> None:
    bar = Bar(steps=3, width=100)
    bar.say("saved [in] /tmp/[run]")
    for step in (1, 2, 3):
        bar.step(line(step))
    bar.close()
    output = capsys.readouterr().out
    # Brackets are text, not markup; the last step stays on the screen.
    assert "saved [in] /tmp/[run]" in output
    assert "step 3/3" in output and "loss 2.5000" in output


def test_a_narrow_bar_is_no_error(capsys: pytest.CaptureFixture) -> None:
    bar = Bar(steps=3, width=20)
    bar.step(line(1))
    bar.close()
    assert capsys.readouterr().out.count("\n") == 1


def test_only_rank_zero_shows_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpipar.train.progress.terminal_width", lambda: 0)
    assert isinstance(make_progress("lines", 9, 1, rank=1), Silence)
    assert isinstance(make_progress("none", 9, 1, rank=0), Silence)
    assert isinstance(make_progress("lines", 9, 1, rank=0), Lines)
    assert isinstance(make_progress("auto", 9, 1, rank=0), Lines)
    silence = make_progress("bar", 9, 1, rank=3)
    silence.say("x"), silence.step(line(1)), silence.close()


def test_auto_is_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("mpipar.train.progress.terminal_width", lambda: 60)
    bar = make_progress("auto", 9, 1, rank=0)
    assert isinstance(bar, Bar)
    bar.close()
    lines = make_progress("lines", 9, 1, rank=0)
    assert isinstance(lines, Lines)


WIDTH = "from mpipar.train.progress import terminal_width; print(terminal_width())"


def test_there_is_no_width_without_a_terminal(tmp_path: Path) -> None:
    # In a pipe below a process that writes to a file, as under mpiexec in a batch job.
    script = f"{sys.executable} -c '{WIDTH}' | cat >seen; true"
    with (tmp_path / "log").open("w") as log:
        subprocess.run(["sh", "-c", script], cwd=tmp_path, stdout=log, timeout=30)
    assert (tmp_path / "seen").read_text().strip() == "0"


def test_the_terminal_above_a_launcher_is_found(tmp_path: Path) -> None:
    # The shell stands for mpiexec: its output is the terminal, its child's a pipe.
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    subprocess.run(["stty", "cols", "77"], stdin=theirs, check=True, timeout=10)
    script = f"{sys.executable} -c '{WIDTH}' | cat >seen; true"
    subprocess.run(
        ["sh", "-c", script], cwd=tmp_path, stdout=theirs, stdin=subprocess.DEVNULL,
        timeout=30,
    )  # fmt: skip
    os.close(theirs), os.close(ours)
    assert (tmp_path / "seen").read_text().strip() == "77"


# --- metrics --------------------------------------------------------------------------


HELD = {"params": 80, "grads": 80, "masters": 40, "unit_buffers": 7}


def fake_engine() -> SimpleNamespace:
    """As much of an engine as metrics look at."""
    held = {**HELD, "optimizer": 160, "activations": 0}
    return SimpleNamespace(
        grid=serial_grid(),
        number=0,
        step_flops=lambda: 1000,
        predicted_memory=lambda: {"params": 80},
        held_memory=lambda: dict(held),
        ops=Ops(),
        simulate=lambda: SimpleNamespace(bubble=0.25),
        executor=SimpleNamespace(peak_bytes=33),
    )


def open_metrics(folder: Path, engine: SimpleNamespace, step: int = 0, **options: bool):
    """Metrics of steps that have 8 labels each."""
    saver = SimpleNamespace(snapshot=SimpleNamespace(nbytes=7))
    saves = SimpleNamespace(saver=saver, copies=None, tokens=lambda: 8 * engine.number)
    options = {"writes": True, **options}
    return Metrics(folder, engine, peak_flops=1e6, saves=saves, step=step, **options)


RESULT = StepResult(
    2.0, grad_norm=0.5, lr=0.1, updated=True, loss_scale=1.0, bubble=0.0, stop=0,
    saved=0,
)  # fmt: skip


def test_each_line_is_on_disk_at_once(tmp_path: Path) -> None:
    engine = fake_engine()
    with open_metrics(tmp_path, engine) as metrics:
        for number in (1, 2):
            engine.number = number
            engine.grid.counters.tally("tp", "all_reduce").calls += 3
            metrics.write(metrics.record(RESULT, tokens=8))
            lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
            assert len(lines) == number
    found = [json.loads(text) for text in lines]
    assert [entry["tokens"] for entry in found] == [8, 16]
    assert [e["comm"]["tp"]["all_reduce"]["calls"] for e in found] == [3, 3]
    memory = found[0]["memory"]
    assert memory["params"] == memory["grads"] == 80 and memory["optimizer"] == 160
    assert memory["snapshot"] == 7 and memory["activations_peak"] == 33
    assert memory["rss_peak"] > 2**20
    assert found[0]["mfu"] == pytest.approx(1000 / found[0]["seconds"] / 1e6)


def test_what_happens_between_steps_is_not_counted(tmp_path: Path) -> None:
    engine = fake_engine()
    with open_metrics(tmp_path, engine, writes=False) as metrics:
        engine.number = 1
        engine.grid.counters.tally("world", "all_reduce").calls += 1
        metrics.restart_clock()
        entry = metrics.record(RESULT, tokens=8)
        metrics.write(entry)
    assert entry["comm"] == {} and entry["seconds"] < 5
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_number_that_is_none_is_still_json(tmp_path: Path) -> None:
    """Other tools than Python's json refuse NaN."""
    engine = fake_engine()
    bad = replace(RESULT, loss=math.nan, grad_norm=math.inf, updated=False)
    with open_metrics(tmp_path, engine) as metrics:
        engine.number = 1
        metrics.write(metrics.record(bad, tokens=8))

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    text = (tmp_path / "metrics.jsonl").read_text()
    json.loads(text, parse_constant=refuse)


def steps_of(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.parametrize(("step", "kept"), [(0, []), (2, [1, 2]), (9, [1, 2, 3])])
def test_lines_that_a_run_repeats_are_not_there_twice(
    tmp_path: Path, step: int, kept: list[int]
) -> None:
    """It goes on at a step; it had come further, and its last line was cut off."""
    lines = [json.dumps({"step": n, "loss": 1.5}) for n in (1, 2, 3)]
    strange = ["", "[]", "null", '{"loss": 1}', '{"step": 1', "\ufffd"]
    text = "\n".join([*lines, *strange, '{"step": 4, "lo'])
    (tmp_path / "metrics.jsonl").write_text(text)
    engine = fake_engine()
    with open_metrics(tmp_path, engine, step) as metrics:
        assert steps_of(tmp_path) == kept
        engine.number = step + 1
        metrics.write(metrics.record(RESULT, tokens=8))
    assert steps_of(tmp_path) == [*kept, step + 1]


def test_a_last_line_without_its_end_stays_a_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')
    engine = fake_engine()
    engine.number = 3
    with open_metrics(tmp_path, engine, 2) as metrics:
        metrics.write(metrics.record(RESULT, tokens=8))
    assert steps_of(tmp_path) == [1, 2, 3]


def test_summary_is_json_with_the_layout(tmp_path: Path) -> None:
    text = "[model]\nfamily='gpt'\nlayers=1\nwidth=8\nheads=2\ncontext=8\n"
    recipe = read_recipe(text + "[train]\nsteps=1\nglobal_batch=1\n", ranks=1)
    write_summary(tmp_path, recipe, {"steps": 4})
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found == {"layout": {"tp": 1, "cp": 1, "dp": 1, "pp": 1}, "steps": 4}


# --- signals --------------------------------------------------------------------------


@pytest.fixture
def handlers() -> Iterator[dict[int, object]]:
    """Handlers that note what came, in place of pytest's."""
    came: dict[int, object] = {}
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {n: signal.getsignal(n) for n in numbers}
    for n in numbers:
        signal.signal(n, lambda number, _: came.update({number: True}))
    yield came
    for n, handler in before.items():
        signal.signal(n, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_acts(
    handlers: dict[int, object], number: int
) -> None:
    with StopSignals() as signals:
        assert not signals.asked
        signal.raise_signal(number)
        assert signals.asked and handlers == {}
        signal.raise_signal(number)
        assert handlers == {number: True}


def test_handlers_are_as_before_afterwards(handlers: dict[int, object]) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    with pytest.raises(ZeroDivisionError), StopSignals():
        signal.raise_signal(signal.SIGTERM)
        raise ZeroDivisionError
    assert {number: signal.getsignal(number) for number in numbers} == before


# --- learning rate --------------------------------------------------------------------


def test_the_learning_rate_warms_up_and_comes_down() -> None:
    text = "[model]\nfamily='gpt'\nlayers=1\nwidth=8\nheads=2\ncontext=8\n"
    text += "[train]\nsteps=11\nglobal_batch=1\n"
    text += "[optimizer]\nlr=1.0\nwarmup=4\nmin_lr=0.2\n"
    rates = [learning_rate(read_recipe(text, ranks=1), step) for step in range(11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0 and rates[7] == pytest.approx(0.6) and rates[10] == 0.2
    assert rates[4:] == sorted(rates[4:], reverse=True)
    constant = read_recipe(text, ["optimizer.schedule=constant"], ranks=1)
    assert {learning_rate(constant, step) for step in range(4, 11)} == {1.0}
