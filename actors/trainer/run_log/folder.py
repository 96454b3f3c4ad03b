"""The folder to which a run writes its log. If the run's `out` is a local folder, the log is written to `out` itself.
If `out` is a URL, the log is written to a local copy, which is uploaded.

Object stores cannot append. A process therefore keeps its files of the run in a temporary folder, and a background
thread uploads the files that have changed. Each file has one writer. A process that is killed loses the lines since the
last upload. To limit this loss, `flush` uploads the lines before a checkpoint is written. Only `fetch`, `remove`,
`flush` and `close` wait for the store.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

from raytide.actors.trainer.checkpoint.storage import UrlStore, named_failures
from raytide.core.errors import ConflictError, RaytideError
from raytide.core.io.private_folder import private_folder
from raytide.core.io.storage import is_local

UPLOAD_EVERY_S = 2.0
MOST_SHARE = 0.05
"""The largest share of the time that uploads take: they are rarer the longer they take."""

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
        self._lock, self._uploading = threading.Lock(), threading.Lock()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    @cached_property
    def path(self) -> Path:
        """The local folder to which this process writes the files."""
        if self.store is None:
            return Path(self.out.removeprefix("file://"))
        return Path(tempfile.mkdtemp(dir=private_folder("runs")))

    def fetch(self, name: str) -> Path:
        """Returns the local path of a file. If `out` is in an object store, first copies the file's content from
        there.
        """
        if self.store is not None:
            with named_failures(f"{self.out}/{name}"), contextlib.suppress(FileNotFoundError):
                with self.store.read(name) as stream:
                    body = stream.read()
                (self.path / name).parent.mkdir(exist_ok=True)
                (self.path / name).write_bytes(body)
        return self.path / name

    def remove(self, name: str) -> None:
        """Removes a file, locally and in the store. Another process may have written the file."""
        (self.path / name).unlink(missing_ok=True)
        if self.store is not None:
            with named_failures(f"{self.out}/{name}"):
                self.store.remove_file(name)

    def changed(self, name: str) -> None:
        """Schedules the upload of a file that has changed."""
        if self.store is None:
            return
        with self._lock:
            self._changed.add(name)
            if self._thread is None:
                self._thread = threading.Thread(target=self._upload_changes, name="run-folder", daemon=True)
                self._thread.start()

    def flush(self) -> bool:
        """Uploads all changed files. Returns whether the store now has all changes."""
        if self.store is not None:
            self._upload(self.store)
        return not self.problem

    def close(self) -> None:
        """Uploads all changed files and removes the local copy."""
        if self.store is None or self._is_over.is_set():
            return
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        self._upload(self.store)
        if "path" in self.__dict__:
            shutil.rmtree(self.path, ignore_errors=True)

    def _upload_changes(self) -> None:
        assert self.store is not None
        wait_s = UPLOAD_EVERY_S
        while not self._is_over.wait(wait_s):
            began_s = time.monotonic()
            self._upload(self.store)
            wait_s = max(UPLOAD_EVERY_S, (time.monotonic() - began_s) / MOST_SHARE)

    def _upload(self, store: UrlStore) -> None:
        with self._uploading:
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
