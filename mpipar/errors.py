"""Exception types. Every message names the wrong value and the values that pass."""

from collections.abc import Sequence


class MpiparError(Exception):
    """Base of all errors that mpipar raises on purpose.

    exit_code  the process's exit status when the error ends a command
    agreed     True when every rank raises this same error together, so that it is
               printed once and nobody needs to be aborted
    speaks     False on ranks whose part another rank tells, which ends the job
    """

    exit_code = 4
    agreed = False
    speaks = True


class ConfigError(MpiparError, ValueError):
    """The recipe or the command is wrong. Lists every violated rule at once."""

    exit_code = 2

    def __init__(self, violations: Sequence[str], title: str = "the recipe") -> None:
        self.violations = list(violations)
        self.title = title
        count = len(self.violations)
        noun = "problem" if count == 1 else "problems"
        lines = "".join(f"\n  - {v}" for v in self.violations)
        super().__init__(f"{title} has {count} {noun}:{lines}")

    def __reduce__(self) -> tuple:
        # Exceptions travel by their message; this one is made from its parts.
        return type(self), (self.violations, self.title), {"agreed": self.agreed}


class DataError(MpiparError, ValueError):
    """A corpus, token file or tokenizer cannot be used as it is."""

    exit_code = 2


class ShapeError(MpiparError, ValueError):
    """An array does not have the shape or the memory order that is needed."""


class DeviceError(MpiparError, RuntimeError):
    """A device is not there, or an array lives on another one."""


class DeviceMemoryError(DeviceError, MemoryError):
    """A device has too little memory; says what holds it and what would need less."""


class CommError(MpiparError, RuntimeError):
    """A message or collective cannot be made, or did not complete in time."""


class RankLostError(CommError):
    """A rank has died, so that what this one waits for will not come."""


class CorruptionError(MpiparError, RuntimeError):
    """Ranks that must hold the same numbers hold different ones."""


class CheckpointError(MpiparError, RuntimeError):
    """A checkpoint cannot be written, found or trusted."""
