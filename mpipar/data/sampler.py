"""Which samples a data rank trains on in each step, and evaluates."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mpipar.data.order import permuted
from mpipar.data.tokens import IGNORE, TokenStream
from mpipar.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of one data rank.

    tokens   (b, s) int64, the inputs
    labels   (b, s) int64, the next token of each position, or IGNORE
    samples  (b,) int64, global number of each sequence in the run. The same in every
             layout, and never used twice, so random numbers (dropout) are drawn by it
    """

    tokens: np.ndarray
    labels: np.ndarray
    samples: np.ndarray


@dataclass(frozen=True, slots=True)
class Sampler:
    """The order of the data: one sequence of samples, whatever the layout.

    Sample number g of the run is place g mod n of epoch g div n, n the train samples;
    an epoch's order is a shuffle keyed by (seed, epoch), in which no sample comes
    twice. Step t uses g = t·B … t·B + B − 1, B the global batch. Data rank r of dp
    takes the r-th of dp equal contiguous slices, and micro-batch k the k-th slice of
    `micro_batch` sequences of that. A run that goes on with another batch begins at
    `first_sample` in `first_step`.

    eval_samples  held-out samples to evaluate, from the first; 0 = all there are
    Raises        ConfigError unless micro_batch · dp divides the global batch
    """

    stream: TokenStream
    seed: int
    global_batch: int
    micro_batch: int
    dp_rank: int = 0
    dp_size: int = 1
    eval_samples: int = 0
    first_step: int = 0
    first_sample: int = 0

    def __post_init__(self) -> None:
        part = self.micro_batch * self.dp_size
        if part < 1 or self.global_batch < 1 or self.global_batch % part:
            raise ConfigError(
                [
                    f"train.global_batch = {self.global_batch} must be a multiple of "
                    f"train.micro_batch · data ranks = {self.micro_batch} · "
                    f"{self.dp_size}"
                ]
            )

    @property
    def valid_tokens(self) -> int:
        """Labels that count in one step, over all data ranks and micro-batches."""
        return self.global_batch * self.stream.context

    @property
    def eval_count(self) -> int:
        """Held-out samples that an evaluation covers, over all data ranks."""
        there = self.stream.held_out_samples
        return min(self.eval_samples, there) if self.eval_samples else there

    @property
    def eval_tokens(self) -> int:
        """Labels that count in one evaluation, over all data ranks."""
        return self.eval_count * self.stream.context

    def sample_of(self, step: int) -> int:
        """Number of the first sample of a step."""
        return self.first_sample + (step - self.first_step) * self.global_batch

    def train_batches(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches of a step, in order; steps count from 0."""
        own = self.global_batch // self.dp_size
        first = self.sample_of(step) + self.dp_rank * own
        return [
            self._train_batch(np.arange(begin, begin + self.micro_batch))
            for begin in range(first, first + own, self.micro_batch)
        ]

    def eval_batches(self) -> Iterator[Batch]:
        """Yield this rank's held-out micro-batches; every rank gets as many.

        A round hands micro_batch samples to each data rank in turn. Where samples run
        out, rows of token 0 whose labels are all IGNORE fill up, so sums of losses over
        ranks, divided by eval_tokens, are the exact mean over eval_count samples.
        """
        stride = self.micro_batch * self.dp_size
        for begin in range(0, self.eval_count, stride):
            first = begin + self.dp_rank * self.micro_batch
            yield self._eval_batch(np.arange(first, first + self.micro_batch))

    def _train_batch(self, numbers: np.ndarray) -> Batch:
        n = self.stream.train_samples
        epoch, place = np.divmod(numbers, n)
        rows = self.stream.rows(permuted(place, n, self.seed, epoch))
        return _cut(rows, numbers)

    def _eval_batch(self, numbers: np.ndarray) -> Batch:
        is_real = numbers < self.eval_count
        rows = np.zeros((numbers.size, self.stream.context + 1), dtype=np.int64)
        rows[is_real] = self.stream.rows(numbers[is_real], held_out=True)
        batch = _cut(rows, numbers)
        batch.labels[~is_real] = IGNORE
        return batch


def _cut(rows: np.ndarray, numbers: np.ndarray) -> Batch:
    return Batch(rows[:, :-1].copy(), rows[:, 1:].copy(), numbers)
