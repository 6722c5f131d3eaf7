"""What training state costs by formula: bytes held on one rank."""

from collections.abc import Sequence


def state_bytes(
    sizes: Sequence[int],
    *,
    stage: int,
    ranks: int,
    prefetch: int,
    accumulation: int,
    item: int,
    operand_item: int,
) -> dict[str, int]:
    """Bytes of params, grads, optimizer and unit_buffers, as metrics name them.

    The first and the last of the units are the root, and B = 1 + prefetch of the blocks
    between them fit into the buffers of stage 3.

    sizes          items of each unit, padded
    ranks          that share a copy;  prefetch  blocks fetched early
    accumulation   micro-batches of a step
    item           bytes of a number;  operand_item  of what products read, which is a
                   copy where that is smaller
    """
    whole = sum(sizes)
    part = whole // ranks if stage else whole
    root = sum(sizes[i] for i in {0, len(sizes) - 1})
    blocks = sizes[1:-1]
    largest = max(blocks, default=0)
    value = item if operand_item == item else item + operand_item
    buffers = 0
    if stage >= 2:
        beside = max(sizes) // ranks if accumulation > 1 else 0
        buffers += item * (root + min(2, len(blocks)) * largest + beside)
    if stage == 3:
        buffers += value * (root + min(1 + prefetch, len(blocks)) * largest)
    return {
        "params": item * part if stage == 3 else value * whole,
        "grads": item * (part if stage >= 2 else whole),
        "optimizer": 2 * item * part,
        "unit_buffers": buffers,
    }
