"""What a person sees of a run: a bar on a terminal, plain lines in a log."""

import os
import sys
from typing import Any, Protocol


class Progress(Protocol):
    """Shows the steps of a run."""

    def say(self, text: str) -> None:
        """One line of news."""

    def step(self, line: dict[str, Any]) -> None:
        """A step has ended; `line` is its line in metrics.jsonl."""

    def close(self) -> None:
        """Nothing more comes."""


class Silence:
    """Shows nothing."""

    def say(self, text: str) -> None:
        pass

    def step(self, line: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class Lines:
    """A plain line every few steps, and for the first and last one."""

    def __init__(self, steps: int, every: int, begin: int = 0) -> None:
        self.steps, self.every, self.begin = steps, every, begin

    def say(self, text: str) -> None:
        print(text, flush=True)

    def step(self, line: dict[str, Any]) -> None:
        number = line["step"]
        is_end = number in (self.begin + 1, self.steps)
        if is_end or number % self.every == 0:
            print(f"step {number}/{self.steps}  {describe(line)}", flush=True)

    def close(self) -> None:
        pass


class Bar:
    """A live bar with loss, speed and time left; news scrolls above it."""

    def __init__(self, steps: int, width: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        # Ranks write to the launcher's pipe; the terminal is at the launcher's end.
        self._console = Console(force_terminal=True, width=width, highlight=False)
        self._bar = RichProgress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("train", total=steps, text="")
        self._bar.start()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def step(self, line: dict[str, Any]) -> None:
        self._bar.update(self._task, completed=line["step"], text=describe(line))

    def close(self) -> None:
        self._bar.stop()


def describe(line: dict[str, Any]) -> str:
    """The numbers of a step that a person follows."""
    text = (
        f"loss {line['loss']:.4f}  norm {line['grad_norm']:.3f}  "
        f"lr {line['lr']:.2e}  {line['tokens_per_second']:,.0f} tok/s  "
        f"mfu {line['mfu']:.0%}"
    )
    if "validation_loss" in line:
        text += f"  validation {line['validation_loss']:.4f}"
    if line["updated"]:
        return text
    if line["loss_scale"] > 1.0:
        return text + f"  skipped: overflow at loss scale {line['loss_scale']:.0f}"
    return text + "  skipped: norm is not finite"


def make_progress(
    mode: str, steps: int, every: int, rank: int, begin: int = 0
) -> Progress:
    """What `log.progress` asks for; only rank 0 shows anything.

    begin   steps made before this run
    """
    if rank != 0 or mode == "none":
        return Silence()
    width = terminal_width()
    if mode == "bar" or (mode == "auto" and width):
        return Bar(steps, width or 100)
    return Lines(steps, every, begin)


def terminal_width() -> int:
    """Columns of the terminal that shows this rank's output, 0 where there is none.

    Under a launcher standard output is a pipe: the terminal is looked for among the
    standard outputs of the processes above this one.
    """
    if sys.stdout.isatty():
        return os.get_terminal_size(sys.stdout.fileno()).columns
    process = os.getppid()
    while process > 1:
        try:
            target = os.readlink(f"/proc/{process}/fd/1")
            with open(f"/proc/{process}/stat", "rb") as stat:
                parent = int(stat.read().rsplit(b")", 1)[1].split()[1])
        except (OSError, ValueError):
            return 0
        if target.startswith(("/dev/pts/", "/dev/tty")):
            return _columns(target)
        if not target.startswith(("pipe:", "socket:", "/dev/null")):
            return 0
        process = parent
    return 0


def _columns(terminal: str) -> int:
    try:
        descriptor = os.open(terminal, os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return 0
    try:
        return os.get_terminal_size(descriptor).columns or 80
    except OSError:
        return 0
    finally:
        os.close(descriptor)
