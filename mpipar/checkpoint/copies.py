"""Copies of the state in the memory of neighbours, for when a rank is lost.

Each rank keeps its share of the state, as a checkpoint has it, and that of one other
rank: after a loss the others still have all of it. What two generations of this hold is
never freed, and the older one is overwritten when a newer one begins.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpipar.checkpoint.files import flush
from mpipar.checkpoint.folder import checkpoints, draft_of, point_to, step_of
from mpipar.checkpoint.fragments import Fragment
from mpipar.checkpoint.saver import Facts, conclude, manifest_of
from mpipar.checkpoint.shard import Layout, Shard, shard_name, write_shard
from mpipar.comm import raise_together
from mpipar.comm.losses import has_lost
from mpipar.errors import CheckpointError, RankLostError
from mpipar.ops import Ops

_GENERATIONS = 2
_TAG = 0
Shapes = dict[str, tuple[int, ...]]


@dataclass(eq=False)
class _Share:
    """What one rank saves, and room for the numbers.

    data   bytes: for each generation, kind and fragment in this order
    """

    owner: int
    layout: Layout
    shapes: Shapes
    data: np.ndarray


class Copies:
    """The own share and that of a neighbour, every few steps. Made by all ranks.

    world      communicator of all ranks;  distance  to the neighbour
    fragments  what this rank saves;  kinds  of numbers
    """

    def __init__(
        self,
        world: Any,
        ops: Ops,
        fragments: Sequence[Fragment],
        kinds: Sequence[str],
        distance: int = 1,
    ) -> None:
        self.world, self.ops = world, ops
        self._to = (world.rank + distance) % world.size
        self._source = (world.rank - distance) % world.size
        regions = [(f.name, f.box, f.begin, f.end) for f in fragments]
        layout = Layout(regions, list(kinds), np.dtype(ops.dtype).name)
        shapes = {f.name: f.shape for f in fragments}
        arrays = [f.arrays[kind] for kind in kinds for f in fragments]
        size = sum(x.nbytes for x in arrays)
        told = world.all_gather_obj((layout, shapes, size))
        self._shares = []
        for rank in dict.fromkeys((world.rank, self._source)):
            *facts, size = told[rank]
            # Only the own share comes from the device.
            make = ops.host_bytes if rank == world.rank else _bytes
            room = make(_GENERATIONS * size).reshape(_GENERATIONS, size)
            self._shares.append(_Share(rank, *facts, room))
        # What is complete: by generation, the oldest first
        self._facts: dict[int, Facts] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(share.data.nbytes for share in self._shares)

    @property
    def predicted(self) -> int:
        """The same by formula: generations, kinds and elements of both shares."""
        layouts = [share.layout for share in self._shares]
        elements = sum(len(layout.kinds) * layout.elements for layout in layouts)
        return _GENERATIONS * elements * np.dtype(self.ops.dtype).itemsize

    def keep(self, facts: Facts, fragments: Sequence[Fragment]) -> None:
        """Copies the state, and exchanges the copies; collective.

        Raises   MPI's error or RankLostError where a rank was lost; not on all others
        """
        turn = next((n for n in range(_GENERATIONS) if n not in self._facts), None)
        if turn is None:
            turn = next(iter(self._facts))
            del self._facts[turn]
        own, *others = self._shares
        room, place = own.data[turn], 0
        for kind in own.layout.kinds:
            for f in fragments:
                x = f.arrays[kind]
                copy = room[place : place + x.nbytes].view(x.dtype)
                self.ops.copy_to_host(x, copy)
                place += x.nbytes
        self.ops.synchronize()
        for other in others:
            self.world.send_recv(room, self._to, other.data[turn], self._source, _TAG)
        if others:
            # What seemed to succeed with a rank that was lost may be wrong. Not MPI's
            # agreement, which waits for ranks that have given up, revoked or not.
            self.world.barrier()
            if has_lost(self.world.mpi):
                raise RankLostError("a rank was lost while the state was copied")
        self._facts[turn] = facts

    def found(self) -> dict[tuple[int, int, int], tuple[Facts, _Share, int]]:
        """What is held, by step, number of ranks and owner."""
        return {
            (facts.progress.step, self.world.size, share.owner): (facts, share, turn)
            for turn, facts in self._facts.items()
            for share in self._shares
        }


def _bytes(size: int) -> np.ndarray:
    return np.empty(size, np.uint8)


def save_copies(copies: Copies | None, world: Any, run: Path) -> Path | None:
    """Makes a checkpoint of the newest generation that is whole; collective.

    copies   None on a rank that has none
    world    communicator of the ranks that are left
    Returns  its folder; None where no generation is whole, or a checkpoint is as new
    Raises   CheckpointError on all ranks together
    """
    mine = {} if copies is None else copies.found()
    held = world.all_gather_obj(list(mine))
    chosen = world.broadcast_obj(_choose(held, run) if world.rank == 0 else None)
    if chosen is None:
        return None
    step, holders = chosen
    draft = draft_of(run, step, world.broadcast_obj(secrets.token_hex(6)))
    written, error = [], None
    for owner, holder in enumerate(holders):
        if holder != world.rank:
            continue
        facts, share, turn = mine[step, len(holders), owner]
        try:
            shard = _write(draft, share, turn)
        except OSError as problem:
            error = CheckpointError(f"cannot save {draft}: {problem}")
            break
        written.append((facts, share.layout, shard, share.shapes))
    raise_together(error, world)
    entries = world.gather_obj(written)
    folder = None
    if world.rank == 0:
        try:
            folder = _conclude(draft, run, [e for part in entries for e in part])
        except (OSError, CheckpointError) as problem:
            error = CheckpointError(f"cannot save {draft}: {problem}")
    raise_together(error, world)
    return world.broadcast_obj(folder)


def _choose(held: list[list[tuple[int, int, int]]], run: Path) -> tuple | None:
    """The newest step of which all shares are held and nothing is on disk; and for each
    share the first rank that holds it."""
    holders: dict[tuple[int, int], dict[int, int]] = {}
    for rank, keys in enumerate(held):
        for step, size, owner in keys:
            holders.setdefault((step, size), {}).setdefault(owner, rank)
    there = [step_of(folder) for folder in checkpoints(run)]
    newest = max(there, default=0)
    for (step, size), found in sorted(holders.items(), reverse=True):
        if step > newest and len(found) == size:
            return step, [found[owner] for owner in range(size)]
    return None


def _write(draft: Path, share: _Share, turn: int) -> Shard | None:
    if not share.layout.regions:
        return None
    draft.mkdir(parents=True, exist_ok=True)
    parts = np.split(share.data[turn], len(share.layout.kinds))
    return write_shard(draft / shard_name(share.owner), share.layout, iter(parts))


def _conclude(draft: Path, run: Path, entries: list[tuple]) -> Path:
    """Gives the draft its name, once all shares are in it."""
    facts, layout, _, _ = entries[0]
    shards = [shard for _, _, shard, _ in entries if shard is not None]
    shards.sort(key=lambda shard: shard.file)
    shapes = {name: shape for *_, part in entries for name, shape in part.items()}
    flush(run)
    folder = conclude(draft, manifest_of(facts, layout, shards, shapes))
    point_to(folder)
    return folder
