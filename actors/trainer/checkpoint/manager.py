"""Saves and loads checkpoints with torch's distributed checkpoint (DCP), for any number of ranks.

A save blocks training only while the state is copied in memory. A background thread writes the copy. The thread has its
own process group, because two threads must not share a gloo group. At most one save is in flight. `wait` raises the
save's error on all ranks.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from raytide.actors.trainer.checkpoint import manifest
from raytide.actors.trainer.checkpoint.async_save import AsyncSaver, Commit, capture_error, first_cause
from raytide.actors.trainer.checkpoint.dcp.planner import ShardLoadPlanner
from raytide.actors.trainer.checkpoint.dcp.storage import DcpReader
from raytide.actors.trainer.checkpoint.manifest import Checkpoint
from raytide.actors.trainer.checkpoint.storage import CheckpointStorage, open_store
from raytide.actors.trainer.checkpoint.train_state import TensorShard, TrainState
from raytide.actors.trainer.distributed.process_group import ProcessGroup
from raytide.actors.trainer.optim.state_offload import DiskStorage
from raytide.core.errors import CheckpointError, DataError, StorageError
from raytide.core.specs.train import TrainSpec

CLOSE_S = 2.0


@dataclass(slots=True)
class Listing:
    """The checkpoints in storage, newest first. Only the manifests of the checkpoints have been read."""

    committed: list[Checkpoint] = field(default_factory=list)
    rejected: list[CheckpointError] = field(default_factory=list)
    bad_folders: list[str] = field(default_factory=list)
    """Folders with a bad manifest."""

    @property
    def newest_step(self) -> int:
        return self.committed[0].manifest.step if self.committed else 0


class UnsavedNotice:
    """The reason why the last checkpoint was not written. `show` returns the reason until a later checkpoint is
    complete. If `show` has not been called by then, its next call still returns the reason.
    """

    def __init__(self) -> None:
        self._why, self._is_shown, self._is_over = "", True, True

    def fail(self, why: str) -> None:
        self._why, self._is_shown, self._is_over = why, False, False

    def end(self) -> None:
        """Records that a later checkpoint is complete."""
        self._is_over = True

    def show(self) -> str:
        why = "" if self._is_over and self._is_shown else self._why
        self._is_shown = True
        return why


class CheckpointManager:
    """The checkpoints of a run, for one generation of ranks.

    All ranks must create the manager together, and call its methods `save`, `list_checkpoints`, `select` and `load`
    together. The other methods are local.
    """

    def __init__(
        self,
        spec: TrainSpec,
        digests: Mapping[str, str],
        group: ProcessGroup,
        commit: Commit = nullcontext,
        earlier: Collection[str] = (),
    ) -> None:
        """`earlier` holds digests with which earlier releases wrote checkpoints that this run may resume from."""
        self.spec, self.digests, self.group, self._earlier = spec, dict(digests), group, frozenset(earlier)
        self._require_same_on_all_ranks()
        self.store = open_store(spec.checkpoint_url)
        self._saver = AsyncSaver(group.new_channel(), group.rank, group.world, digests, spec.keep_checkpoints, commit)
        if spec.memory.parameters == "disk":
            self._saver.buffer.disk = DiskStorage(spec.memory.scratch)
        self._token = group.from_first(uuid.uuid4().hex)
        self._count = 0
        self._in_flight = False

    @property
    def save_s(self) -> float:
        """The duration of the last successful save in seconds, including the removal of old checkpoints. 0.0 before the
        first save.
        """
        return self._saver.last_save_s

    @property
    def has_failed(self) -> bool:
        """True if the last save has failed and `wait` has not raised its error yet."""
        return self._saver.task.has_failed

    @property
    def has_saved(self) -> bool:
        """True if the latest save has succeeded and `wait` has not been called since that save started."""
        return self._in_flight and not self.is_saving and not self.has_failed

    @property
    def is_saving(self) -> bool:
        return self._saver.task.is_running

    def prepare(self, state: TrainState) -> None:
        """Allocates the staging buffer, so that the first save is as fast as later ones."""
        self._saver.buffer.prepare(state.shards())

    def save(self, state: TrainState, step: int) -> None:
        """Waits for the previous save, and raises that save's error if it failed. Then copies the state, and starts to
        write the copy in the background.
        """
        self.wait()
        self._saver.buffer.copy_from(state.shards())
        self._count += 1
        attempt_id = hashlib.sha256(f"{self._token}/{self._count}".encode()).hexdigest()[:8]
        samples = step * self.spec.global_batch
        self._saver.start(self.store, manifest.folder_name(step, attempt_id), step, samples)
        self._in_flight = True

    def before_update(self) -> None:
        """Makes weight updates on the GPU wait until a running copy has read the weights. The host does not wait. This
        method must be called before the weights change.
        """
        self._saver.buffer.before_update()

    def wait(self) -> bool:
        """Waits for the save in flight. Returns whether there was one.

        Raises StorageError if the save failed (full disk, unreachable bucket). Older checkpoints remain intact.
        """
        in_flight, self._in_flight = self._in_flight, False
        self._saver.task.wait()
        return in_flight

    def close(self) -> None:
        """Abandons a save in flight. The folder of the save remains in storage as an unfinished write. Returns quickly,
        because it does not communicate.
        """
        self._saver.close(CLOSE_S)

    def list_checkpoints(self) -> Listing:
        """Returns the committed checkpoints and the rejected ones. Starts to remove the folders of unfinished writes.
        No rank is still writing to these folders, because the saves of earlier generations have been cancelled before
        this call.
        """
        listing, failed = self.group.from_first(
            capture_error(self._list_folders) if self.group.is_first else (None, None)
        )
        if failed is not None:
            raise failed
        assert listing is not None
        self._saver.rejected = listing.bad_folders
        return listing

    def select(self, listing: Listing, in_memory: int = 0) -> Checkpoint | None:
        """Returns the newest intact checkpoint after step `in_memory`, the step of the state that peers hold, or 0.
        Returns None if there is none. Each candidate's files are read completely, and the ranks share this work.

        Appends the reason for each rejected checkpoint to `listing.rejected`. Raises CheckpointError if all
        checkpoints are bad and peers hold no state, because silently starting over would lose work. Also raises
        CheckpointError if the newest intact checkpoint was written by another run.
        """
        for checkpoint in listing.committed:
            if checkpoint.manifest.step <= in_memory:
                return None
            problems = self._find_problems(checkpoint)
            if not problems:
                self._require_same_run(checkpoint)
                return checkpoint
            listing.rejected.append(manifest.bad_checkpoint(problems[0]))
            self._saver.rejected.append(checkpoint.name)
        if self._saver.rejected and not in_memory:
            raise listing.rejected[-1]
        return None

    def load(self, state: TrainState, checkpoint: Checkpoint) -> None:
        where = f"{self.store.url}/{checkpoint.name}"

        def fill(pieces: list[TensorShard]) -> None:
            reader = DcpReader(self.store, checkpoint)
            load({}, storage_reader=reader, planner=ShardLoadPlanner(pieces), process_group=self.group.io)

        try:
            state.load(fill)
        except CheckpointException as error:  # a BaseException, so callers would not catch it
            cause = first_cause(error)
            if isinstance(cause, StorageError):
                raise cause from error
            raise CheckpointError(
                f"cannot load {where}: {cause}", hint="Resume with the spec that wrote it."
            ) from error

    def _list_folders(self) -> Listing:
        listing = Listing()
        leftovers = manifest.unfinished_folders(self.store)
        for name in manifest.folders_newest_first(self.store):
            try:
                listing.committed.append(manifest.read(self.store, name))
            except CheckpointError as error:
                listing.rejected.append(error)
                if name not in leftovers:
                    listing.bad_folders.append(name)
        store = self.store
        self._saver.task.start(lambda: _remove(store, leftovers))
        return listing

    def _find_problems(self, checkpoint: Checkpoint) -> list[str]:
        """Returns the checkpoint's problems, as found by all ranks: each reads a share of the files."""
        files = sorted(checkpoint.manifest.files)[self.group.rank :: self.group.world]
        found = self.group.gather(capture_error(lambda: manifest.find_problems(self.store, checkpoint, files)))
        for _, failed in found:
            if failed is not None:
                raise failed
        return [problem for problems, _ in found for problem in problems or []]

    def _require_same_on_all_ranks(self) -> None:
        """Raises DataError if a rank reads another model or dataset than rank 0, such as an old copy on its node."""
        first, *others = self.group.gather(self.digests)
        for rank, digests in enumerate(others, 1):
            if different := [what for what, digest in first.items() if digests.get(what) != digest]:
                raise DataError(
                    f"{self.spec.name}: rank {rank} has a different {different[0]} than rank 0.",
                    hint="Give all members the same files, or a place that all of them reach.",
                )

    def _require_same_run(self, checkpoint: Checkpoint) -> None:
        for what, digest in self.digests.items():
            if checkpoint.manifest.digests.get(what) not in (digest, *self._earlier):
                raise CheckpointError(
                    f"{self.store.url}/{checkpoint.name} was written with a different {what}.",
                    hint="Resume with the spec that wrote it, or choose another out directory.",
                )


def _remove(store: CheckpointStorage, names: list[str]) -> None:
    for name in names:  # a failure is harmless: the next generation tries again
        capture_error(partial(manifest.remove, store, name))
