"""When a run saves, and what it has cost."""

from collections.abc import Callable
from typing import Any

from mpipar.checkpoint import Copies, Facts, Progress, Saved, Saver
from mpipar.config import to_toml
from mpipar.data import Sampler
from mpipar.engine import Engine, StepResult
from mpipar.train.interval import best_interval


class Saves:
    """The saves of a run, all of which all ranks make together.

    run        id of the run;  began_tokens  labels counted before it began
    say        tells a person;  copies  in the memory of neighbours, if any are wanted
    exposed_s, longest_s   seconds that the run waited; the longest save, start to end
    """

    def __init__(
        self,
        engine: Engine,
        sampler: Sampler,
        saver: Saver,
        run: str,
        began: Progress,
        say: Callable[[str], None],
        copies: Copies | None = None,
    ) -> None:
        self.engine, self.sampler, self.saver = engine, sampler, saver
        self.run, self.began, self.say = run, began, say
        self.copies = copies
        self.options = engine.recipe.checkpoint
        self.count = 0
        self.bytes = 0
        self.exposed_s = self.longest_s = 0.0
        # The step whose state is saved, or being saved
        self.saved_at = began.step if began.step else -1
        engine.before_update = saver.freeze

    def tokens(self) -> int:
        """Labels that have counted since the first step of all."""
        steps = self.engine.number - self.began.step
        return self.began.tokens + steps * self.sampler.valid_tokens

    def step_ended(self, result: StepResult) -> None:
        """Goes on with the save that is open, and begins one where one is due."""
        if self.saver.is_open and result.saved == self.engine.grid.world.size:
            self._note(self.saver.advance())

    def if_due(self) -> bool:
        """Begins a save where the recipe wants one after this step; True if so."""
        every = self.options.every
        if not every or self.engine.number % every:
            return False
        self._begin()
        if not getattr(self.options, "async"):
            self._note(self.saver.finish())
        return True

    def copy_if_due(self) -> bool:
        """Copies the state to a neighbour where the recipe wants it; True if so."""
        if self.copies is None or self.engine.number % self.options.copy_every:
            return False
        self.copies.keep(self._facts(), self.engine.fragments(share=True))
        return True

    def last(self) -> None:
        """The state as it is now is on disk when this returns.

        Raises   CheckpointError on all ranks together
        """
        self._begin()
        self._note(self.saver.finish(), must=True)

    def summary(self, step_s: float) -> dict[str, Any]:
        """What the saves have cost, and how often it would pay to save.

        step_s   seconds of a step
        """
        if not self.count:
            return {"count": 0}
        cost = self.exposed_s / self.count
        best = best_interval(cost, 3600 * self.options.failure_hours)
        return {
            "count": self.count,
            "bytes": self.bytes,
            "seconds": self.longest_s,
            "exposed_seconds": cost,
            "advised_every": max(1, round(best / step_s)) if step_s else None,
        }

    def _begin(self) -> None:
        number = self.engine.number
        if self.saved_at == number:
            return
        # One at a time
        self._note(self.saver.finish())
        self.saved_at = number
        engine = self.engine
        fragments = engine.fragments(share=True)
        self.saver.begin(self._facts(), fragments, engine.saved_kinds)

    def _facts(self) -> Facts:
        engine = self.engine
        recipe, layout = to_toml(engine.recipe), engine.grid.describe()
        return Facts(self.run, recipe, layout, self._progress())

    def _progress(self) -> Progress:
        engine, scale = self.engine, self.engine.loss_scale
        return Progress(
            step=engine.number,
            updates=engine.optimizer.count,
            samples=self.sampler.sample_of(engine.number),
            tokens=self.tokens(),
            train_samples=self.sampler.stream.train_samples,
            loss_scale=scale.value,
            good_steps=scale.good,
            open_scale=engine.open_scale,
        )

    def _note(self, saved: Saved | None, *, must: bool = False) -> None:
        """A save has ended, or not yet."""
        if saved is None:
            return
        if saved.error is not None:
            self.saved_at = -1
            if must or self.options.on_error == "stop":
                # Messages of a batch that is open would have no end.
                self.engine.drain()
                raise saved.error
            self.say(f"warning: {saved.error}; the run goes on")
            return
        self.count += 1
        self.bytes = saved.bytes
        self.exposed_s += saved.exposed_seconds
        self.longest_s = max(self.longest_s, saved.seconds)
        self.say(
            f"saved {saved.folder}: {saved.bytes / 1e6:,.1f} MB in "
            f"{saved.seconds:.2f} s, {saved.exposed_seconds:.2f} s of them waited"
        )
        if saved.note:
            self.say(f"note: {saved.note}")
