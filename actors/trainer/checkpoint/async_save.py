"""Writes checkpoints on a background thread: plan, write, hash, commit, prune.

The thread may outlive its generation of ranks for a moment. For that reason it has a process group of its own. If it
used the generation's group, the group would stay open, and peers would not notice that this rank has left.
"""

from __future__ import annotations

import logging
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

_log = logging.getLogger(__name__)
T = TypeVar("T")
Commit = Callable[[], AbstractContextManager[None]]
"""Returns a context in which this run may publish. The context raises ConflictError if another run has claimed its
folders.
"""


class AsyncSaver:
    """Saves the checkpoints of one rank in one generation of ranks."""

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
        """Duration of the last successful save in seconds, until old checkpoints are removed."""
        self.rejected: list[str] = []
        """Folders of bad checkpoints, which do not count towards `keep`."""
        self._channel, self._rank, self._world = channel, rank, world
        self._digests, self._keep, self._commit = dict(digests), keep, commit
        self._closed = threading.Event()

    def start(self, store: CheckpointStorage, name: str, step: int, samples: int) -> None:
        """Starts to write the staging buffer in the background. The caller must have waited for the previous save."""
        began_s = time.monotonic()
        self.task.start(lambda: self._save(store, name, step, samples, began_s))

    def close(self, timeout_s: float) -> None:
        self._closed.set()
        try:
            self.task.wait(timeout_s)
        except BaseException:  # broken by a dead peer or cancelled: the generation is over either way
            return

    def _save(self, store: CheckpointStorage, name: str, step: int, samples: int, began_s: float) -> None:
        writer = DcpWriter(store, name, self._raise_if_closed)
        try:
            self.buffer.wait()
            save({}, storage_writer=writer, planner=ShardSavePlanner(self.buffer.shards), process_group=self._channel)
        except CheckpointException as error:  # all ranks raise it, so none is still writing
            if self._rank == 0:
                capture_error(lambda: manifest.remove(store, name))
            raise _unwrap(error, f"{store.url}/{name}") from error
        records: list[dict[str, FileRecord]] = [{}] * self._world
        dist.all_gather_object(records, writer.records, group=self._channel)
        failed: list[RaytideError | None] = [None]
        if self._rank == 0:
            files = {file: record for part in records for file, record in sorted(part.items())}
            body = Manifest(step=step, samples=samples, digests=self._digests, world=self._world, files=files)
            failed[0] = capture_error(lambda: self._commit_manifest(store, name, body))[1]
        dist.broadcast_object_list(failed, src=0, group=self._channel)
        if failed[0] is not None:
            raise failed[0]
        self.last_save_s = time.monotonic() - began_s

    def _commit_manifest(self, store: CheckpointStorage, name: str, body: Manifest) -> None:
        self._raise_if_closed()
        try:
            with self._commit():
                sealed = manifest.commit(store, name, body)
        except RaytideError:
            capture_error(lambda: manifest.remove(store, name))
            raise
        try:
            manifest.prune(store, self._keep, sealed, self.rejected)
        except (RaytideError, OSError) as error:  # the checkpoint is stored, and the next save prunes again
            _log.warning("old checkpoints were not removed: %s", error)

    def _raise_if_closed(self) -> None:
        if self._closed.is_set():
            raise SaveCancelled("the generation that began this save is over")


class BackgroundTask:
    """Runs one job at a time on a thread. The jobs are checkpoint writes and snapshot exchanges."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """True if the last job failed and `wait` has not raised the job's error yet."""
        return self._error is not None and not self.is_running

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None]) -> None:
        """Waits for the previous job, then starts `job`. If the previous job failed, raises its error and does not
        start `job`.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name=self._name, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the job and raises the job's error once. Returns False if the job still runs after `timeout_s`."""
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
        except BaseException as error:  # re-raised by `wait`; DCP's own errors are BaseExceptions
            self._error = error


def capture_error(work: Callable[[], T]) -> tuple[T | None, RaytideError | None]:
    """Runs `work` and returns a pair: its result, and the RaytideError that it raised. The error is None if `work`
    succeeded. A rank that works alone uses this function, so that it can send the error to the ranks that wait.
    """
    try:
        return work(), None
    except RaytideError as error:
        return None, error


def first_cause(error: CheckpointException) -> BaseException:
    return next((cause for cause, _ in error.failures.values()), error)


def _unwrap(error: CheckpointException, path: str) -> BaseException:
    """Returns the raytide error inside DCP's exception."""
    causes = [cause for cause, _ in error.failures.values()]
    for cause in causes:
        if isinstance(cause, SaveCancelled):  # not a storage failure: another generation will save
            return RuntimeError(f"a rank cancelled writing {path}: {cause}")
    for cause in causes:
        if isinstance(cause, StorageError):
            return cause
    return StorageError(f"cannot write {path}: {first_cause(error)}", hint="Check the path and its permissions.")
