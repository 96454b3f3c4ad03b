"""The folder to which a run writes its log. If the run's `out` is a local folder, the log is written to `out` itself.
If `out` is a URL, the log is written to a local copy, which is uploaded.

Object stores cannot append. A process therefore keeps its files of the run in a temporary folder, and a background
thread uploads the files that have changed. Each file has one writer. A process that is killed loses the lines since the
last upload. To limit this loss, `flush` uploads the lines before a checkpoint is written. Only `fetch`, `watch`,
`flush` and `close` wait for the store, and none of them longer than `STORE_TIMEOUT_S`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path

from raytide.actors.trainer.checkpoint.storage import UrlStore
from raytide.core.errors import ConflictError, RaytideError, WaitTimeoutError
from raytide.core.io.private_folder import temporary_folder
from raytide.core.io.storage import is_local, named_failures
from raytide.core.io.timeout import call_with_timeout

_log = logging.getLogger(__name__)
UPLOAD_EVERY_S = 2.0
MOST_SHARE = 0.05
"""The largest share of the time that uploads take: they are rarer the longer they take."""
STORE_TIMEOUT_S = 300.0
"""The seconds for which one call waits for the store."""

Guard = Callable[[], AbstractContextManager[None]]


class RunFolder:
    """The files that this process writes for the run in `out`."""

    def __init__(self, out: str, guard: Guard = contextlib.nullcontext) -> None:
        """Uploads run inside `guard`, which raises ConflictError once another run holds the claim."""
        self.out = out.rstrip("/")
        self.store = None if is_local(out) else UrlStore(out)
        self.problem = ""
        """The reason why the last upload failed; empty if it succeeded."""
        self._guard = guard
        self._changed: set[str] = set()
        self._watched = ""
        self._is_removed = False
        """True while the store may still have the watched file, although this process removed it."""
        self._warning = ""
        self._lock = threading.Condition()
        self._asked = self._answered = 0  # calls of `flush`
        self._is_over = False
        self._thread: threading.Thread | None = None

    @cached_property
    def path(self) -> Path:
        """The local folder to which this process writes the files."""
        if self.store is None:
            return Path(self.out.removeprefix("file://"))
        return temporary_folder("runs")

    def fetch(self, name: str) -> Path:
        """Returns the local path of a file. If `out` is in an object store, first copies the file's content from
        there. Raises WaitTimeoutError if the store does not answer.
        """
        if self.store is not None:
            body = call_with_timeout(STORE_TIMEOUT_S, f"{self.out}/{name}", partial(self._read, self.store, name))
            if body is not None:
                (self.path / name).parent.mkdir(exist_ok=True)
                (self.path / name).write_bytes(body)
        return self.path / name

    def watch(self, name: str) -> None:
        """Keeps a local copy of the file `name`, which another process may write to the store. Copies the file now, and
        again after each later round of uploads.
        """
        self._watched = name
        if self.store is not None:
            try:
                call_with_timeout(STORE_TIMEOUT_S, f"{self.out}/{name}", partial(self._receive, self.store))
            except WaitTimeoutError as error:
                self.warn(f"{name} was not read: {error}")
            with self._lock:
                self._start_uploads()

    def remove_watched(self) -> None:
        """Removes the watched file locally, and schedules its removal from the store. Until the store has removed the
        file, this process makes no new local copy.
        """
        with self._lock:
            self._is_removed = self.store is not None
            (self.path / self._watched).unlink(missing_ok=True)

    def changed(self, name: str) -> None:
        """Schedules the upload of a file that has changed."""
        if self.store is None:
            return
        with self._lock:
            self._changed.add(name)
            self._start_uploads()

    def flush(self, timeout_s: float = STORE_TIMEOUT_S) -> bool:
        """Uploads all changed files. Returns whether the store now has all changes. If the upload takes longer than
        `timeout_s`, returns False, and the upload goes on in the background.
        """
        if self.store is None:
            return True
        with self._lock:
            self._asked = asked = self._asked + 1
            self._start_uploads()
            self._lock.notify_all()
            return self._lock.wait_for(lambda: self._answered >= asked, timeout_s) and not self.problem

    def warn(self, warning: str) -> None:
        """Logs a warning, unless it is the same as the previous warning."""
        if warning != self._warning:
            _log.warning("%s", warning)
            self._warning = warning

    def close(self) -> None:
        """Uploads all changed files and removes the local copy. If the upload fails or takes too long, the local copy
        stays.
        """
        if self.store is None or self._is_over:
            return
        with self._lock:
            self._is_over = True
            self._start_uploads()
            self._lock.notify_all()
        assert self._thread is not None
        self._thread.join(STORE_TIMEOUT_S)
        if self._thread.is_alive() or self._changed:
            self.warn(f"{self.out} did not take the last changes; they are in {self.path}")
        elif "path" in self.__dict__:
            shutil.rmtree(self.path, ignore_errors=True)

    def _start_uploads(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._upload_changes, name="run-folder", daemon=True)
            self._thread.start()

    def _upload_changes(self) -> None:
        assert self.store is not None
        wait_s, is_last = UPLOAD_EVERY_S, False
        while not is_last:
            with self._lock:
                self._lock.wait_for(lambda: self._asked > self._answered or self._is_over, wait_s)
                asked, is_last = self._asked, self._is_over
            began_s = time.monotonic()
            self._upload(self.store)
            with self._lock:
                self._answered = asked
                self._lock.notify_all()
            self._remove(self.store)
            if not is_last:
                self._receive(self.store)
            wait_s = max(UPLOAD_EVERY_S, (time.monotonic() - began_s) / MOST_SHARE)

    def _upload(self, store: UrlStore) -> None:
        with self._lock:
            names, self._changed = sorted(self._changed), set()
        problem = ""
        for name in names:
            try:
                body = (self.path / name).read_bytes()
                with self._guard(), named_failures(f"{self.out}/{name}"):
                    store.publish(name, body)
            except ConflictError as error:  # the files belong to another run now
                problem = str(error)
            except (RaytideError, OSError) as error:
                problem = str(error)
                with self._lock:
                    self._changed.add(name)
        if names:
            self.problem = problem

    def _remove(self, store: UrlStore) -> None:
        if not self._is_removed:
            return
        try:
            with named_failures(f"{self.out}/{self._watched}"):
                store.remove_file(self._watched)
        except RaytideError as error:
            self.warn(f"{self._watched} was not removed: {error}")
        else:
            self._is_removed = False

    def _receive(self, store: UrlStore) -> None:
        """Copies the watched file to the local folder, unless this process removed it."""
        if not self._watched or self._is_removed:
            return
        part = self.path / f"{self._watched}.part"
        try:
            body = self._read(store, self._watched)
        except RaytideError as error:
            self.warn(f"{self._watched} was not read: {error}")
            return
        if body is None:
            return
        part.write_bytes(body)
        with self._lock:  # the file may have been removed while it was read
            if not self._is_removed:
                os.replace(part, self.path / self._watched)

    def _read(self, store: UrlStore, name: str) -> bytes | None:
        """Returns the content of a file in the store; None if there is no such file."""
        with named_failures(f"{self.out}/{name}"), contextlib.suppress(FileNotFoundError), store.read(name) as stream:
            return stream.read()
        return None
