"""Checkpoints by torch's distributed checkpoint (DCP): written beside the training, read by any number of ranks.

A save costs training one copy in memory. A thread writes that copy on a process group of its own: two threads that
share one break it. At most one save is in flight, and its error is raised where it is waited for, on all ranks.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from raytide.actors.trainer.checkpoint import manifest
from raytide.actors.trainer.checkpoint.async_save import AsyncSaver, Commit, attempt, first_cause
from raytide.actors.trainer.checkpoint.dcp.planner import LoadPieces
from raytide.actors.trainer.checkpoint.dcp.storage import Reader
from raytide.actors.trainer.checkpoint.manifest import Checkpoint
from raytide.actors.trainer.checkpoint.storage import CheckpointStorage, open_store
from raytide.actors.trainer.checkpoint.train_state import TensorShard, TrainState
from raytide.actors.trainer.distributed.process_group import ProcessGroup
from raytide.core.errors import CheckpointError, StorageError
from raytide.core.specs.train import TrainSpec

CLOSE_S = 2.0


@dataclass(slots=True)
class Listing:
    """What lies in the store, newest first. The files themselves were not read yet."""

    sealed: list[Checkpoint] = field(default_factory=list)
    passed_over: list[CheckpointError] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    """The folders whose manifest is no good."""

    @property
    def newest_step(self) -> int:
        return self.sealed[0].manifest.step if self.sealed else 0


class CheckpointManager:
    """A run's checkpoints, as one generation of ranks sees them. All ranks call every method but `close` together."""

    def __init__(
        self, spec: TrainSpec, digests: Mapping[str, str], group: ProcessGroup, commit: Commit = nullcontext
    ) -> None:
        self.spec, self.digests, self.group = spec, dict(digests), group
        self.store = open_store(spec.checkpoint_url)
        self._saves = AsyncSaver(group.channel(), group.rank, group.world, digests, spec.keep_checkpoints, commit)
        self._life = group.from_first(uuid.uuid4().hex)
        self._count = 0
        self._in_flight = False

    @property
    def save_s(self) -> float:
        """From the copy to the manifest, of the last save; 0.0 before there is one."""
        return self._saves.last_s

    @property
    def failed(self) -> bool:
        """A save has failed, and `wait` will say why."""
        return self._saves.beside.failed

    @property
    def saved(self) -> bool:
        """A save was begun, and is whole now."""
        return self._in_flight and not self.saving and not self.failed

    @property
    def saving(self) -> bool:
        return self._saves.beside.running

    def prepare(self, state: TrainState) -> None:
        """Make room for the copy, so that the first save is no slower than the others."""
        self._saves.image.prepare(state.pieces())

    def save(self, state: TrainState, step: int) -> None:
        """Copy the state, and write the copy beside the training. Waits for the save before, and raises its error."""
        self.wait()
        self._saves.image.copy(state.pieces())
        self._count += 1
        attempt_id = hashlib.sha256(f"{self._life}/{self._count}".encode()).hexdigest()[:8]
        samples = step * self.spec.global_batch
        self._saves.start(self.store, manifest.folder_name(step, attempt_id), step, samples)
        self._in_flight = True

    def before_update(self) -> None:
        """Call before weights change: a copy may still be under way on the GPU."""
        self._saves.image.before_update()

    def wait(self) -> bool:
        """Until no save is in flight; whether one was, and is whole now. StorageError for one that failed (a full disk,
        a lost bucket); the older ones are whole."""
        in_flight, self._in_flight = self._in_flight, False
        self._saves.beside.wait()
        return in_flight

    def close(self) -> None:
        """Give up what is in flight: it stays an unfinished write. For this rank alone, and quick."""
        self._saves.close(CLOSE_S)

    def look(self) -> Listing:
        """What can be loaded. What interrupted writes have left is removed, since nobody writes there any more."""
        listing, failed = self.group.from_first(attempt(self._list) if self.group.is_first else (None, None))
        if failed is not None:
            raise failed
        assert listing is not None
        self._saves.rejected = listing.bad
        return listing

    def choose(self, listing: Listing) -> Checkpoint | None:
        """The newest checkpoint, every byte of it read by the ranks together; why others were passed over is noted.

        CheckpointError when there are some and none is good, or when another run wrote it: to start over in silence
        would lose work.
        """
        for checkpoint in listing.sealed:
            problems = self._check(checkpoint)
            if not problems:
                self._is_ours(checkpoint)
                return checkpoint
            listing.passed_over.append(manifest.bad(problems[0]))
            self._saves.rejected.append(checkpoint.name)
        if self._saves.rejected:
            raise listing.passed_over[-1]
        return None

    def load(self, state: TrainState, checkpoint: Checkpoint) -> None:
        where = f"{self.store.url}/{checkpoint.name}"

        def fill(pieces: list[TensorShard]) -> None:
            reader = Reader(self.store, checkpoint)
            load({}, storage_reader=reader, planner=LoadPieces(pieces), process_group=self.group.io)

        try:
            state.load(fill)
        except CheckpointException as error:  # a BaseException: nothing above would catch it
            cause = first_cause(error)
            if isinstance(cause, StorageError):
                raise cause from error
            raise CheckpointError(f"cannot load {where}: {cause}", hint="Go on with the spec that wrote it.") from error

    def _list(self) -> Listing:
        listing = Listing()
        leftovers = manifest.unfinished(self.store)
        for name in manifest.newest_first(self.store):
            try:
                listing.sealed.append(manifest.read(self.store, name))
            except CheckpointError as error:
                listing.passed_over.append(error)
                if name not in leftovers:
                    listing.bad.append(name)
        store = self.store
        self._saves.beside.start(lambda: _remove(store, leftovers))
        return listing

    def _check(self, checkpoint: Checkpoint) -> list[str]:
        """What is wrong with it; each rank reads its share of the files."""
        files = sorted(checkpoint.manifest.files)[self.group.rank :: self.group.world]
        found = self.group.gather(attempt(lambda: manifest.problems(self.store, checkpoint, files)))
        for _, failed in found:
            if failed is not None:
                raise failed
        return [problem for problems, _ in found for problem in problems or []]

    def _is_ours(self, checkpoint: Checkpoint) -> None:
        for what, ours in self.digests.items():
            if checkpoint.manifest.digests.get(what) != ours:
                raise CheckpointError(
                    f"{self.store.url}/{checkpoint.name} was written with another {what}.",
                    hint="Go on with the spec that wrote it, or choose another out directory.",
                )


def _remove(store: CheckpointStorage, names: list[str]) -> None:
    for name in names:  # one that cannot be removed harms nobody, and the next generation tries again
        attempt(partial(manifest.remove, store, name))
