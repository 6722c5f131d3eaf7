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
    """Bytes of each kind of training state, under the names of metrics.

    The first and the last of the units are the root, and B = 1 + prefetch of the blocks
    between them fit into the buffers of stage 3.

    sizes          items of each unit, padded
    ranks          that share a copy;  prefetch  blocks fetched early
    accumulation   micro-batches of a step
    item           bytes of a number of the compute type;  operand_item  of the operand
                   type, which is smaller in mixed precision
    """
    whole = sum(sizes)
    part = whole // ranks if stage else whole
    root = sum(sizes[i] for i in {0, len(sizes) - 1})
    blocks = sizes[1:-1]
    largest = max(blocks, default=0)
    summed = item if accumulation > 1 else operand_item
    buffers = 0
    if stage >= 2:
        beside = max(sizes) // ranks if accumulation > 1 else 0
        buffers += operand_item * (root + min(2, len(blocks)) * largest)
        buffers += summed * beside
    if stage == 3:
        buffers += operand_item * (root + min(1 + prefetch, len(blocks)) * largest)
    return {
        "params": operand_item * (part if stage == 3 else whole),
        "grads": summed * (part if stage >= 2 else whole),
        "masters": item * part if operand_item < item else 0,
        "optimizer": 2 * item * part,
        "unit_buffers": buffers,
    }
