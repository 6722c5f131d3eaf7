"""What training state costs by formula: bytes held on one rank."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence


def state_bytes(
    sizes: Sequence[int],
    root: Collection[int],
    *,
    stage: int,
    ranks: int,
    prefetch: int,
    accumulation: int,
    beside: bool,
    item: int,
    operand_item: int,
) -> dict[str, int]:
    """Bytes of each kind of training state, under the names of metrics.

    sizes          items of each unit, padded;  root  those of embedding and head
    ranks          that share a copy;  prefetch  blocks fetched early
    accumulation   micro-batches of a step
    beside         whether sums of a unit arrive more than once in a step
    item           bytes of a number of the compute type;  operand_item  of the operand
                   type, which is smaller in mixed precision
    """
    whole = sum(sizes)
    part = whole // ranks if stage else whole
    ends = sum(sizes[i] for i in root)
    blocks = [size for i, size in enumerate(sizes) if i not in root]
    largest = max(blocks, default=0)
    summed = item if accumulation > 1 else operand_item
    buffers = 0
    if stage >= 2:
        buffers += operand_item * (ends + min(2, len(blocks)) * largest)
        buffers += summed * (max(sizes, default=0) // ranks if beside else 0)
    if stage == 3:
        buffers += operand_item * (ends + min(1 + prefetch, len(blocks)) * largest)
    return {
        "params": operand_item * (part if stage == 3 else whole),
        "grads": summed * (part if stage >= 2 else whole),
        "masters": item * part if operand_item < item else 0,
        "optimizer": 2 * item * part,
        "unit_buffers": buffers,
    }


def sums(tables: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """One table with the sums of several."""
    total: Counter = Counter()
    for table in tables:
        total.update(table)
    return dict(total)
