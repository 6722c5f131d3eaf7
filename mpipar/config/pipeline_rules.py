"""Rules of the pipeline: schedule, chunks, micro-batches, partition."""

import re
from difflib import get_close_matches

from mpipar.config.kinds import counts_as_text
from mpipar.config.nearest import advice, divisors, either
from mpipar.config.register import rule
from mpipar.config.schedules import NEEDS, is_file
from mpipar.config.values import Values
from mpipar.config.write import shown

# Parts of a pipeline: each has two tags, and every MPI has tags up to 32767.
MOST_PARTS = 1 << 14


@rule("parallel.schedule")
def _schedule_is_known(v: Values, schedule: str) -> str | None:
    if schedule in NEEDS or is_file(schedule):
        return None
    near = get_close_matches(schedule, NEEDS, n=1)
    names = either(NEEDS)
    text = f"{v.say('parallel.schedule')} must be {names}, or a file"
    return text + (f"; try {shown(near[0])}" if near else "")


@rule("parallel.schedule", "parallel.chunks")
def _chunks_of_schedule(v: Values, schedule: str, chunks: int) -> str | None:
    if schedule not in NEEDS:
        return None
    least, most = NEEDS[schedule].chunks
    if chunks >= least and (most is None or chunks <= most):
        return None
    limit = f"{least}" if most == least else f"at least {least}"
    text = (
        f"{v.say('parallel.chunks')} must be {limit} for {v.say('parallel.schedule')}"
    )
    return text + advice({"parallel.chunks": [least if chunks < least else most]})


@rule("parallel.chunks", "parallel.pipeline", "model.layers")
def _chunks_have_blocks(v: Values, chunks: int, stages: int, layers: int) -> str | None:
    most = max(2, layers)
    if chunks <= most and chunks * stages <= MOST_PARTS:
        return None
    if chunks > most:
        text = f"{v.say('parallel.chunks')} must be at most {v.say('model.layers')}"
        return text + advice({"parallel.chunks": [most]})
    return (
        f"parallel.pipeline * parallel.chunks = {stages * chunks} must be at most "
        f"{MOST_PARTS}, for which MPI has tags"
    )


@rule(
    "parallel.schedule", "parallel.pipeline", "parallel.data", "train.global_batch",
    "train.micro_batch",
)  # fmt: skip
def _micro_batches_fill_stages(
    v: Values, schedule: str, stages: int, data: int, batch: int, micro: int
) -> str | None:
    if schedule not in NEEDS or batch % (data * micro):
        return None
    count, needed = batch // (data * micro), NEEDS[schedule].per_stage * stages
    if count >= needed:
        return None
    text = (
        f"{v.say('parallel.schedule')} needs at least {needed} micro-batches on "
        f"{stages} stages, but train.global_batch / (parallel.data * "
        f"train.micro_batch) = {count}"
    )
    own = batch // data
    fitting = [n for n in divisors(own) if own // n >= needed]
    options = {
        "train.micro_batch": fitting[-1:],
        "train.global_batch": [needed * data * micro],
    }
    return text + advice(options)


@rule("parallel.partition", "parallel.pipeline", "model.layers")
def _partition_has_all_blocks(
    v: Values, partition: str, stages: int, layers: int
) -> str | None:
    if partition in ("even", "measured"):
        return None
    words = [word.strip() for word in counts_as_text(partition).split(",")]
    if not all(re.fullmatch("[0-9]{1,9}", word) for word in words):
        return f'{v.say("parallel.partition")} must be "even", "measured" or "N,N,..."'
    counts = [int(word) for word in words]
    wrong = []
    chunks = v.get("parallel.chunks")
    if chunks and len(counts) != stages * chunks:
        wrong.append(
            f"have {stages * chunks} numbers (parallel.pipeline * parallel.chunks), "
            f"not {len(counts)}"
        )
    if sum(counts) != layers:
        wrong.append(f"add up to {v.say('model.layers')}, not to {sum(counts)}")
    if not wrong:
        return None
    return f"{v.say('parallel.partition')} must {' and '.join(wrong)}"
