"""Runs torch's profiler over the steps that the spec names. On request, it runs over the next steps of a running job.

A request is a file in the run's directory. Rank 0 looks for the file once per step, and passes the request to all
ranks in the step's all-reduce. If the directory is in an object store, a background thread copies the file to rank
0's machine, so that the other ranks need not wait while rank 0 asks the store.

Every rank then writes a Chrome trace and a table. A spec can ask for a snapshot of the GPU's memory or for NVTX
ranges instead.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from raytide.actors.trainer.run_log.folder import RunFolder
from raytide.core.errors import UsageError
from raytide.core.io.storage import exists, join, write_bytes
from raytide.core.specs.train import ProfileSpec

if TYPE_CHECKING:
    import torch

    from raytide.actors.trainer.run_log.recordings import Recording

_log = logging.getLogger(__name__)
REQUEST = "profile.json"


def request(out: str | Path, steps: int) -> None:
    """Asks the run in `out` to profile its next `steps` steps."""
    if steps < 1:
        raise UsageError(f"cannot profile {steps} steps.", hint="Ask for one or more.")
    if not exists(str(out)):
        raise UsageError(f"there is no run in {out}.", hint="Give the `out` of a run that has started.")
    write_bytes(join(str(out), REQUEST), f"{json.dumps({'steps': steps})}\n".encode())


class Profiler:
    """Profiles one rank. All ranks must call `begin` and `end` at the same steps."""

    def __init__(self, spec: ProfileSpec | None, folder: RunFolder, rank: int, device: torch.device) -> None:
        self.spec, self.folder, self.rank, self.device = spec, folder, rank, device
        self._running: Recording | None = None
        self._first = self._last = 0
        self._stuck: tuple[int, int] | None = None
        """The inode and the time of a request that is done but could not be removed."""
        if rank == 0:
            folder.watch(REQUEST)

    def requested_steps(self) -> int:
        """Returns the number of steps that a request asks to profile. Returns 0 if there is no request, and on all
        ranks except rank 0.
        """
        if self.rank or self._running is not None:
            return 0
        file = self.folder.path / REQUEST
        try:
            if self._stuck is not None and _identity(file) == self._stuck:
                return 0
            return max(0, int(json.loads(file.read_text())["steps"]))
        except FileNotFoundError:
            return 0
        except OSError as error:
            self.folder.warn(f"a request for a profile cannot be read: {error}")
            return 0
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            with suppress(OSError):
                file.rename(file.with_name(f"{REQUEST}.bad"))
            self._remove_request()
            return 0

    def begin(self, step: int, requested: int) -> None:
        """Starts a profile if it is due. Call it before the work of step number `step`, counted from 1."""
        if self._running is not None:
            return
        if requested:
            self._start(step, step + requested - 1)
            if self.rank == 0:
                self._remove_request()
        elif self.spec is not None and self.spec.first <= step <= self.spec.last:
            self._start(step, self.spec.last, self.spec.what)

    def end(self, step: int) -> None:
        """Writes the profile if its last step is done. Call it after the work of step number `step`."""
        if self._running is not None and step >= self._last:
            self.close(step)

    def close(self, step: int) -> None:
        """Writes the profile of the steps up to `step`, even if the run stops before the profile's last step. If the
        profile cannot be written, it is dropped with a warning.
        """
        running, self._running = self._running, None
        if running is None:
            return
        running.stop()
        name = f"profile/steps-{self._first}-{step}/rank-{self.rank}"
        stem = self.folder.path / name
        try:
            if running.suffixes:
                stem.parent.mkdir(parents=True, exist_ok=True)
            running.write(stem)
            for suffix in running.suffixes:
                self.folder.changed(f"{name}{suffix}")
        except (OSError, RuntimeError) as error:  # torch reports a failed write as a RuntimeError
            for suffix in running.suffixes:
                with suppress(OSError):
                    Path(f"{stem}{suffix}").unlink()
            _log.warning("the profile of steps %d to %d was not written: %s", self._first, step, error)

    def _remove_request(self) -> None:
        try:
            self.folder.remove_watched()
        except OSError as error:
            self.folder.warn(f"a request for a profile cannot be removed: {error}")
            with suppress(OSError):
                self._stuck = _identity(self.folder.path / REQUEST)

    def _start(self, first: int, last: int, what: str = "operators") -> None:
        from raytide.actors.trainer.run_log.recordings import RECORDINGS

        self._first, self._last = first, last
        self._running = RECORDINGS[what](self.device)


def _identity(file: Path) -> tuple[int, int]:
    """Returns what tells a file from another one that is written in its place."""
    about = file.stat()
    return about.st_ino, about.st_mtime_ns
