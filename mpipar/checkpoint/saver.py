"""Saves the state of all ranks, in the background if wanted, so that it survives.

A save has two parts. Each rank writes and flushes a file of its own; then, once all
have done so, rank 0 writes the manifest and gives the folder its name (`folder`). Both
run in a thread that does file work only; between them, and at the end, all ranks meet
in `advance`, at a moment that they have agreed on: each says whether it is `ready` in
a message that a step sends anyway, or `finish` waits for all.
"""

import re
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from mpipar.checkpoint.files import flush
from mpipar.checkpoint.folder import commit, draft_of, point_to, prune
from mpipar.checkpoint.fragments import Fragment
from mpipar.checkpoint.manifest import FORMAT, MANIFEST, Manifest, Progress, encode
from mpipar.checkpoint.shard import Layout, Shard, shard_name, write_shard
from mpipar.checkpoint.snapshot import Snapshot
from mpipar.checkpoint.views import write_views
from mpipar.comm import awaited, file_work, raise_together
from mpipar.errors import CheckpointError, RankLostError
from mpipar.ops import Ops

# Seconds after which ranks that wait for a disk say that they are alive
_SIGN_OF_LIFE_S = 0.5


@dataclass(frozen=True)
class Facts:
    """What a checkpoint says of its run, equal on all ranks; see `Manifest`."""

    run: str
    recipe: str
    layout: str
    progress: Progress


@dataclass(frozen=True)
class Saved:
    """How a save has ended, the same on all ranks but for the times.

    folder    the checkpoint;  bytes  of all its files
    error     why there is none; what was there before is untouched
    note      what a person should know, such as an old one that cannot be removed
    seconds   from begin to end;  exposed_seconds  of them when the caller had to wait
    """

    folder: Path
    bytes: int = 0
    error: CheckpointError | None = None
    note: str = ""
    seconds: float = 0.0
    exposed_seconds: float = 0.0


class Saver:
    """Saves into one run folder, one save at a time.

    Collective: all ranks of `world` make it, and call `begin`, `advance`, `finish`
    together.

    keep      newest checkpoints that stay; 0 = all
    snapshot  what a save that goes on holds of the state
    """

    def __init__(self, run: Path, world: Any, ops: Ops, *, keep: int = 0) -> None:
        self.run, self.world, self.keep = run, world, keep
        self.snapshot = Snapshot(ops)
        self._token = world.broadcast_obj(secrets.token_hex(6))
        self._thread = ThreadPoolExecutor(1, "save")
        self._job: Future | None = None
        self._facts: Facts | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._layout: Layout | None = None
        self._is_ending = False
        self._began = self._exposed = 0.0

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error nobody waits for a disk, unless this process goes on.
        goes_on = kind is None or issubclass(kind, RankLostError)
        self._thread.shutdown(wait=goes_on)

    @property
    def is_open(self) -> bool:
        """True from `begin` until a save has ended; equal on all ranks."""
        return self._facts is not None

    @property
    def ready(self) -> bool:
        """True where nothing keeps this rank from `advance`."""
        return self.is_open and (self._job is None or self._job.done())

    def begin(
        self, facts: Facts, fragments: Sequence[Fragment], kinds: Sequence[str]
    ) -> None:
        """Begins to save the fragments that this rank owns; none may be open.

        They may change only after `freeze`, or once the save has ended.
        """
        assert not self.is_open, "a save is open"
        self._began, self._exposed = time.perf_counter(), 0.0
        with self._waiting():
            self._facts, self._is_ending = facts, False
            self._shapes = {f.name: f.shape for f in fragments}
            regions = [(f.name, f.box, f.begin, f.end) for f in fragments]
            dtype = np.dtype(self.snapshot.ops.dtype).name
            self._layout = Layout(regions, list(kinds), dtype)
            arrays = [f.arrays[kind] for kind in kinds for f in fragments]
            self.snapshot.begin(arrays)
            self._job = self._thread.submit(self._write) if regions else None

    def freeze(self) -> None:
        """What is being saved is about to change."""
        with self._waiting():
            self.snapshot.freeze()

    def advance(self) -> Saved | None:
        """All ranks are ready: begins the second part, or ends the save.

        Collective.
        """
        with self._waiting():
            result, error = None, None
            if self._job is not None:
                try:
                    result = self._job.result()
                except (OSError, RuntimeError) as problem:
                    error = CheckpointError(f"cannot save {self._final}: {problem}")
                self._job = None
            try:
                raise_together(error, self.world)
            except CheckpointError as problem:
                return self._fail(problem)
            if not self._is_ending:
                self._is_ending = True
                self._begin_ending(result)
                return None
            folder, size, note = self.world.broadcast_obj(result)
        return self._end(Saved(folder, size, note=note))

    def finish(self) -> Saved | None:
        """Waits for the save that is open, if one is; collective."""
        saved = None
        with awaited():
            while self.is_open:
                with self._waiting():
                    if self._job is not None:
                        wait([self._job], _SIGN_OF_LIFE_S)
                    busy = np.array([float(not self.ready)])
                    busy = self.world.all_reduce(busy, "max")
                if not busy[0]:
                    saved = self.advance()
        return saved

    @property
    def _draft(self) -> Path:
        return draft_of(self.run, self._facts.progress.step, self._token)

    @property
    def _final(self) -> Path:
        return self._draft.with_name(self._draft.name.partition(".")[0])

    def _write(self) -> Shard:
        """The first part, in the thread."""
        with file_work("making", self._draft):
            self._draft.mkdir(parents=True, exist_ok=True)
        path = self._draft / shard_name(self.world.rank)
        # Closed at once where that fails: `freeze` would wait for its part for ever.
        with closing(self.snapshot.parts()) as parts:
            return write_shard(path, self._layout, parts)

    def _begin_ending(self, shard: Shard | None) -> None:
        entries = self.world.gather_obj((shard, self._shapes))
        if self.world.rank == 0:
            shards = [entry for entry, _ in entries if entry is not None]
            shapes = {n: shape for _, part in entries for n, shape in part.items()}
            self._job = self._thread.submit(self._conclude, shards, shapes)

    def _conclude(
        self, shards: list[Shard], shapes: dict[str, tuple[int, ...]]
    ) -> tuple[Path, int, str]:
        """The second part, in the thread of rank 0."""
        manifest = manifest_of(self._facts, self._layout, shards, shapes)
        # The folder of all checkpoints may be as new.
        flush(self.run)
        folder = conclude(self._draft, manifest)
        note = ""
        try:
            point_to(folder)
            prune(self.run, self.keep)
        except OSError as problem:
            # It is saved all the same; what `latest` names stays.
            note = f"latest, or an old checkpoint, cannot be changed: {problem}"
        with file_work("listing", folder):
            size = sum(f.stat().st_size for f in folder.iterdir())
        return folder, size, note

    def _fail(self, error: CheckpointError) -> Saved:
        """Ends a save that did not succeed; nothing of it stays."""
        if self.world.rank == 0:
            with file_work("removing", self._draft):
                shutil.rmtree(self._draft, ignore_errors=True)
        return self._end(Saved(self._final, error=error))

    def _end(self, saved: Saved) -> Saved:
        self.snapshot.begin([])
        self._facts = None
        seconds = time.perf_counter() - self._began
        return Saved(
            saved.folder, saved.bytes, saved.error, saved.note, seconds, self._exposed
        )

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """The caller waits in here."""
        began = time.perf_counter()
        try:
            with awaited():
                yield
        finally:
            self._exposed += time.perf_counter() - began


def manifest_of(
    facts: Facts,
    layout: Layout,
    shards: list[Shard],
    shapes: dict[str, tuple[int, ...]],
) -> Manifest:
    """What a save has written; views are still missing."""
    return Manifest(
        format=FORMAT,
        creator="mpipar",
        run=facts.run,
        saved=datetime.now(UTC).isoformat(timespec="seconds"),
        recipe=facts.recipe,
        layout=facts.layout,
        progress=facts.progress,
        dtype=layout.dtype,
        kinds=layout.kinds,
        arrays={name: shapes[name] for name in sorted(shapes, key=_natural)},
        shards=shards,
        views={},
    )


def conclude(draft: Path, manifest: Manifest, final: Path | None = None) -> Path:
    """Writes views and manifest into a draft that has its shards; then commits it.

    Returns the checkpoint's folder, `final`. Raises OSError or CheckpointError.
    """
    for shard in manifest.shards:
        with file_work("looking for", draft / shard.file):
            is_there = (draft / shard.file).is_file()
        if not is_there:
            raise CheckpointError(
                f"{draft / shard.file} was written on another node and is not seen "
                "here: a run folder must be on a file system that all nodes share"
            )
    views = write_views(draft, manifest)
    file = draft / MANIFEST
    text = encode(manifest.model_copy(update={"views": views}))
    with file_work("writing", file):
        file.write_text(text, encoding="utf-8")
    flush(file)
    return commit(draft, final)


def _natural(name: str) -> list[tuple[int, Any]]:
    """Numbers in names are ordered as numbers."""
    words = re.findall(r"\d+|\D+", name)
    return [(0, int(word)) if word.isdigit() else (1, word) for word in words]
