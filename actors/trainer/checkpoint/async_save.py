"""The write of one checkpoint after the other, beside the training: plan, write, hash, seal, prune.

What runs here may outlive its generation for a moment. So it holds a process group of its own and no other: one that is
held stays open, and then the peers that wait for this rank would not learn that it has left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from raytide.actors.trainer.checkpoint import manifest
from raytide.actors.trainer.checkpoint.dcp.planner import ShardSavePlanner
from raytide.actors.trainer.checkpoint.dcp.storage import DcpWriter, SaveCancelled
from raytide.actors.trainer.checkpoint.manifest import FileRecord, Manifest
from raytide.actors.trainer.checkpoint.staging import StagingBuffer
from raytide.actors.trainer.checkpoint.storage import CheckpointStorage
from raytide.core.errors import RaytideError, StorageError

T = TypeVar("T")
Commit = Callable[[], AbstractContextManager[None]]
"""Inside it this run may publish; ConflictError when another one has its folders by now."""


class AsyncSaver:
    """The saves of one generation, as one of its ranks makes them."""

    def __init__(
        self,
        channel: dist.ProcessGroup,
        rank: int,
        world: int,
        digests: Mapping[str, str],
        keep: int,
        commit: Commit = nullcontext,
    ) -> None:
        self.buffer = StagingBuffer()
        self.task = BackgroundTask("checkpoint")
        self.last_save_s = 0.0
        """From the copy to the manifest, of the last save."""
        self.rejected: list[str] = []
        """Folders that were found to be bad: they do not count among those that are kept."""
        self._channel, self._rank, self._world = channel, rank, world
        self._digests, self._keep, self._commit = dict(digests), keep, commit
        self._closed = threading.Event()

    def start(self, store: CheckpointStorage, name: str, step: int, samples: int) -> None:
        """Write the image. The one before must have been waited for."""
        began_s = time.monotonic()
        self.task.start(lambda: self._save(store, name, step, samples, began_s))

    def close(self, timeout_s: float) -> None:
        self._closed.set()
        try:
            self.task.wait(timeout_s)
        except BaseException:  # a dead peer broke it, or this very call: the generation is over either way
            return

    def _save(self, store: CheckpointStorage, name: str, step: int, samples: int, began_s: float) -> None:
        writer = DcpWriter(store, name, self._raise_if_closed)
        try:
            self.buffer.wait()
            save({}, storage_writer=writer, planner=ShardSavePlanner(self.buffer.shards), process_group=self._channel)
        except CheckpointException as error:  # all ranks have it, so none of them still writes
            if self._rank == 0:
                capture_error(lambda: manifest.remove(store, name))
            raise _unwrap(error, f"{store.url}/{name}") from error
        records: list[dict[str, FileRecord]] = [{}] * self._world
        dist.all_gather_object(records, writer.records, group=self._channel)
        box: list[RaytideError | None] = [None]
        if self._rank == 0:
            files = {file: record for part in records for file, record in sorted(part.items())}
            body = Manifest(step=step, samples=samples, digests=self._digests, world=self._world, files=files)
            box[0] = capture_error(lambda: self._commit_manifest(store, name, body))[1]
        dist.broadcast_object_list(box, src=0, group=self._channel)
        if box[0] is not None:
            raise box[0]
        self.last_save_s = time.monotonic() - began_s

    def _commit_manifest(self, store: CheckpointStorage, name: str, body: Manifest) -> None:
        self._raise_if_closed()
        try:
            with self._commit():
                sealed = manifest.commit(store, name, body)
        except RaytideError:
            capture_error(lambda: manifest.remove(store, name))
            raise
        manifest.prune(store, self._keep, sealed, self.rejected)

    def _raise_if_closed(self) -> None:
        if self._closed.is_set():
            raise SaveCancelled("the generation that began this save is over")


class BackgroundTask:
    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """The last job ended with an error that nobody has been told of yet."""
        return self._error is not None and not self.is_running

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None]) -> None:
        """Run `job` once the one before has ended; its error, if it had one, is raised here."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name=self._name, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until the job has ended, and raise its error once. False when it still runs after `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self.is_running:
            return False
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # raised where it is waited for; DCP's own is no Exception
            self._error = error


def capture_error(work: Callable[[], T]) -> tuple[T | None, RaytideError | None]:
    """For what one rank does while the others wait for the outcome."""
    try:
        return work(), None
    except RaytideError as error:
        return None, error


def first_cause(error: CheckpointException) -> BaseException:
    return next((cause for cause, _ in error.failures.values()), error)


def _unwrap(error: CheckpointException, path: str) -> BaseException:
    """The failure inside DCP's bundle, in the words of raytide's own tree."""
    causes = [cause for cause, _ in error.failures.values()]
    for cause in causes:
        if isinstance(cause, SaveCancelled):  # nothing is wrong with the storage, and another generation will save
            return RuntimeError(f"a rank gave up writing {path}: {cause}")
    for cause in causes:
        if isinstance(cause, StorageError):
            return cause
    return StorageError(f"cannot write {path}: {first_cause(error)}", hint="Check the path and its permissions.")
