"""The grid of ranks over MPI: who shares an axis with whom, and on which nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from mpipar.comm import Communicator, NullCommunicator, mpi
from mpipar.comm.bell import Bell
from mpipar.comm.calls import CallLog
from mpipar.comm.checked import CheckedCommunicator
from mpipar.comm.device import CheckedDeviceCommunicator, DeviceCommunicator
from mpipar.comm.memory import DeviceMemory
from mpipar.comm.watchdog import Watchdog
from mpipar.errors import ConfigError, RankLostError
from mpipar.grid.places import AXES, by_node, check_sizes, coords_of, peers_of
from mpipar.grid.serial import SerialGrid

_JOINED = {"grad": ("dp", "cp")}
# What is made for arrays on a device or not, and for calls that are compared or not
_KINDS = {
    (False, False): Communicator,
    (False, True): CheckedCommunicator,
    (True, False): DeviceCommunicator,
    (True, True): CheckedDeviceCommunicator,
}
# Their operations are few and small, or messages: not worth a communicator of NCCL
_WITHOUT_NCCL = ("world", "pp", "ends")


class Grid(SerialGrid):
    """One communicator per axis and joined axis of ``world``, made by all its ranks.

    Ranks are renumbered node by node, then laid out with the first axis of ``order``
    running fastest, so that the axes that move most stay inside a node. Axes of size 1
    are null communicators. Communicators are made in the same order on all ranks and
    freed by ``close``, which all ranks must call (or leave the ``with`` block).

    world      MPI communicator whose ranks take part; it stays the caller's
    sizes      ranks along tp, cp, dp and pp; an axis left out has size 1
    order      the axes, fastest first
    node_size  pretend that a node holds so many ranks (MPIPAR_NODE_SIZE does the same)
    experts    how many neighbours share experts; 0 = there are none
    along      the axes that they are neighbours on
    timeout_s  patience of the watchdog with one operation; 0 switches it off
    check_calls  ranks compare each call before it is made (MPIPAR_CHECK_CALLS=1 too)
    devices    arrays may lie on devices, once `use` was called
    hierarchical  scatter and gather inside of nodes and between them in turn

    Raises ConfigError on all ranks if the axes do not multiply to the world's size.
    """

    def __init__(
        self,
        world: mpi.Comm,
        sizes: Mapping[str, int],
        order: Sequence[str] = AXES,
        node_size: int | None = None,
        timeout_s: float = 0.0,
        devices: bool = False,
        experts: int = 0,
        along: Sequence[str] = ("cp", "dp"),
        hierarchical: bool = True,
        check_calls: bool = False,
    ) -> None:
        check_sizes(sizes, order, world.size)
        super().__init__()
        self.sizes = {axis: sizes.get(axis, 1) for axis in AXES}
        self.order = tuple(order)
        self._log = CallLog()
        is_checked = check_calls or os.environ.get("MPIPAR_CHECK_CALLS") == "1"
        self._kind = _KINDS[devices, is_checked]
        self._memory: DeviceMemory | None = None
        self._nccl = False
        self._experts, self._along = experts, tuple(along)
        self._hierarchical = hierarchical
        self._made: list[Communicator] = []
        self._subs: dict[str, Communicator | NullCommunicator] = {}
        self._watchdog: Watchdog | None = None
        self._bell: Bell | None = None

        # Renumber the ranks node by node
        nodes, one_node, crowded, self.node_rank = _survey(world, node_size)
        ranks = by_node(nodes)
        self._nodes = [nodes[rank] for rank in ranks]
        self.size = world.size
        self.rank = ranks.index(world.rank)
        self.coords = coords_of(self.rank, self.sizes, self.order)
        if self.size == 1:
            if timeout_s > 0:
                # Files can block a rank that is alone, too
                self._watchdog = Watchdog(world, self._log, timeout_s, one_node=True)
            return

        # Cut the world along every axis, in the same order on all ranks
        base = world.Split(0, self.rank)
        self._bell = Bell(base) if crowded else None
        self.world = self._adopt(base, "world", range(self.size))
        names = (*AXES, *_JOINED, *(("ep", "edp") if experts else ()))
        for name in names:
            setattr(self, name, self._cut(name, self._peers(name, self.rank)))
        if timeout_s > 0:
            self._watchdog = Watchdog(base, self._log, timeout_s, one_node)

    def sub(self, axis: str, ranks: int) -> Communicator | NullCommunicator:
        """Return the communicator of blocks of ``ranks`` neighbours on ``axis``.

        Rank r of the axis is in block r // ranks. Made by all ranks together when first
        asked for, named "axis/ranks", and freed by ``close``. Raises ConfigError on all
        ranks unless ``ranks`` divides the axis.
        """
        block, _ = self._blocks(axis, ranks)
        return self._sub(f"{axis}/{ranks}", block)

    def across(self, axis: str, ranks: int) -> Communicator | NullCommunicator:
        """Return the communicator of the ranks with the same place in each block.

        Blocks are those of `sub`; named "axis:ranks", otherwise the same.
        """
        _, across = self._blocks(axis, ranks)
        return self._sub(f"{axis}:{ranks}", across)

    def ends(self) -> Communicator | NullCommunicator:
        """Return the communicator of the first and last rank of the pipeline.

        A null communicator on ranks between them. Made as `sub` is.
        """
        peers = self._peers("pp", self.rank)
        both = [peers[0], peers[-1]] if len(peers) > 1 else peers
        if "ends" not in self._subs:
            if len(peers) == 1:
                made = NullCommunicator("ends")
            elif self.rank in both:
                comm = self.world.mpi.Split(peers[0], self.rank)
                made = self._adopt(comm, "ends", both)
            else:
                self.world.mpi.Split(mpi.UNDEFINED, self.rank)
                made = NullCommunicator("ends")
            self._subs["ends"] = made
        return self._subs["ends"]

    def use(self, memory: DeviceMemory, nccl: bool) -> None:
        """Say how arrays on devices travel from now on; all ranks do so together.

        nccl   collectives go through NCCL; raises DeviceError on all ranks where it
               fails
        """
        self._memory, self._nccl = memory, nccl
        for comm in self._made:
            self._equip(comm)

    def crosses_nodes(self, axis: str) -> bool:
        """True if some group of ``axis`` has ranks on more than one node."""
        return any(
            len({self._nodes[peer] for peer in self._peers(axis, rank)}) > 1
            for rank in range(self.size)
        )

    def far_distance(self) -> int:
        """Return the least distance at which most ranks meet one of another node."""

        def far(distance: int) -> int:
            others = self._nodes[distance:] + self._nodes[:distance]
            return sum(a != b for a, b in zip(self._nodes, others, strict=True))

        return max(range(1, self.size), key=far, default=1)

    def describe(self) -> str:
        """Return axes and nodes, as in "tp 2 x dp 4 = 8 ranks on 2 nodes"."""
        count = len(set(self._nodes))
        return f"{super().describe()} on {count} node{'s' if count > 1 else ''}"

    def close(self) -> None:
        """Stop the watchdog and free all communicators; a second call does nothing."""
        try:
            if self._made:
                self.world.barrier()  # the last call that is watched
        finally:
            self._leave()
        while self._made:
            self._made.pop().free()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an error that other ranks do not share, nobody may come to free anything
        if error is None or getattr(error, "agreed", False):
            self.close()
        elif isinstance(error, RankLostError):
            self._leave()

    def _leave(self) -> None:
        """Close what is this rank's own."""
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        if self._bell is not None:
            self._bell.close()

    def _blocks(self, axis: str, ranks: int) -> tuple[list[int], list[int]]:
        """Peers in the own block of an axis, and at the own place of all blocks."""
        peers = self._peers(axis, self.rank)
        if ranks < 1 or len(peers) % ranks:
            error = ConfigError(
                [f"blocks of {ranks} ranks do not divide axis {axis} of {len(peers)}"],
                title="the grid",
            )
            error.agreed = True
            raise error
        block, place = divmod(peers.index(self.rank), ranks)
        return peers[block * ranks : (block + 1) * ranks], peers[place::ranks]

    def _sub(self, name: str, peers: list[int]) -> Communicator | NullCommunicator:
        if name not in self._subs:
            self._subs[name] = self._cut(name, peers)
        return self._subs[name]

    def _peers(self, name: str, rank: int) -> list[int]:
        if name in ("ep", "edp"):
            peers = peers_of(rank, self._along, self.sizes, self.order)
            block, place = divmod(peers.index(rank), self._experts)
            start = block * self._experts
            near = peers[start : start + self._experts]
            return near if name == "ep" else peers[place :: self._experts]
        axes = _JOINED.get(name, (name,))
        return peers_of(rank, axes, self.sizes, self.order)

    def _cut(self, name: str, peers: list[int]) -> Communicator | NullCommunicator:
        """Make the communicator of ``peers``, as all ranks do for theirs."""
        if len(peers) == 1:
            return NullCommunicator(name)
        return self._adopt(self.world.mpi.Split(peers[0], self.rank), name, peers)

    def _adopt(self, comm: mpi.Comm, name: str, members: Sequence[int]) -> Communicator:
        nodes = [self._nodes[rank] for rank in members] if self._hierarchical else None
        self._made.append(
            self._kind(
                comm, name, self.counters,
                log=self._log, members=members, bell=self._bell, nodes=nodes,
            )
        )  # fmt: skip
        if self._memory is not None:
            self._equip(self._made[-1])
        return self._made[-1]

    def _equip(self, comm: DeviceCommunicator) -> None:
        comm.use(self._memory, self._nccl and comm.name not in _WITHOUT_NCCL)


def _survey(
    world: mpi.Comm, node_size: int | None
) -> tuple[list[int], bool, bool, int]:
    """Return each rank's node, if it is the only one, if ranks outnumber cores, and the
    own place on the node.

    The first may be pretended by ``node_size``; the others are as they are.
    """
    node = world.Split_type(mpi.COMM_TYPE_SHARED, world.rank)
    cores: set[int] = set().union(*node.allgather(_own_cores()))
    leader = node.bcast(world.rank)
    crowded = world.allreduce(node.size > len(cores), mpi.LOR)
    one_node, node_rank = node.size == world.size, node.rank
    node.Free()
    if node_size is None:
        node_size = int(os.environ.get("MPIPAR_NODE_SIZE", "0"))
    place = world.rank // node_size if node_size else leader
    return world.allgather(place), one_node, crowded, node_rank


def _own_cores() -> set[int]:
    """Cores this process may use; launchers often bind each rank to one of them."""
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return affinity(0) if affinity else set(range(os.cpu_count() or 1))
