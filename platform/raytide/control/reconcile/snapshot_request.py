"""Gives other processes the Snapshot of a running controller, through files. These processes make decisions from the
Snapshot.

Only the controller observes the cluster. It writes the Snapshot only on request, because writing a large Snapshot on
every tick would cost more than the decision.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from raytide.control.supervision.wake_pipe import wake_controller
from raytide.control.views import to_json
from raytide.core.errors import ClusterError
from raytide.core.io.atomic_file import write_json
from raytide.core.io.storage import full_disk_is_an_error
from raytide.core.objects.snapshot import Snapshot

_ASKED, _ANSWER = "snapshot.asked", "snapshot.json"
_POLL_S = 0.05


def answer_request(folder: Path, snapshot: Snapshot) -> None:
    """Writes the decision's input to a file if another process has requested it. Every tick that decides calls this
    function; a tick during a hold does not."""
    asked = folder / _ASKED
    if asked.exists():
        asked.unlink()  # first, so that the next tick answers later requests
        write_json(folder / _ANSWER, to_json(_shared(snapshot)), is_kept=False)


def request_snapshot(folder: Path, patience_s: float = 10.0) -> str:
    """Returns the input of the controller's next decision, as JSON. Raises ClusterError if the controller does not
    answer."""
    before = _version(folder)
    with full_disk_is_an_error(str(folder / _ASKED)):
        (folder / _ASKED).touch()
    wake_controller(folder)
    deadline_s = time.monotonic() + patience_s
    while _version(folder) == before:
        if time.monotonic() >= deadline_s:
            raise ClusterError(
                f"the controller made no tick within {patience_s:g} s.",
                hint="See `raytide status` and `raytide doctor`.",
            )
        time.sleep(_POLL_S)
    return (folder / _ANSWER).read_text()


def _shared(snapshot: Snapshot) -> Snapshot:
    """Returns the snapshot without the users' job and engine configurations, which decisions do not read."""
    jobs = tuple(replace(job, spec=job.spec.model_copy(update={"config": {}})) for job in snapshot.jobs)
    endpoints = tuple(
        replace(view, endpoint=replace(view.endpoint, spec=view.endpoint.spec.model_copy(update={"engine": {}})))
        for view in snapshot.endpoints
    )
    return replace(snapshot, jobs=jobs, endpoints=endpoints)


def _version(folder: Path) -> tuple[int, int]:
    """Identifies the answer that is there: two files of one clock tick of the kernel have the same time."""
    try:
        found = (folder / _ANSWER).stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns
