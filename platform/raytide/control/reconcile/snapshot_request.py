"""The Snapshot of a running controller, for who wants to decide on it elsewhere: asked for by a file, answered by one.

Only the controller looks at the world, and writing a large Snapshot at every tick would cost more than deciding on it.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from raytide.control.views import to_json
from raytide.core.errors import ClusterError
from raytide.core.io.atomic_file import write_json
from raytide.core.io.storage import full_disk_is_an_error
from raytide.core.objects.snapshot import Snapshot

_ASKED, _ANSWER = "snapshot.asked", "snapshot.json"
_POLL_S = 0.05


def answer(folder: Path, seen: Snapshot) -> None:
    """The controller's part of every tick: write what it decided on, if somebody asked."""
    asked = folder / _ASKED
    if asked.exists():
        asked.unlink()  # first, so that who asks from now on is answered by the next tick
        write_json(folder / _ANSWER, to_json(_shared(seen)), is_kept=False)


def ask(folder: Path, patience_s: float = 10.0) -> str:
    """What the controller sees in its next tick, as JSON. ClusterError when it does not tick."""
    before = _written_ns(folder)
    with full_disk_is_an_error(str(folder / _ASKED)):
        (folder / _ASKED).touch()
    deadline_s = time.monotonic() + patience_s
    while _written_ns(folder) == before:
        if time.monotonic() >= deadline_s:
            raise ClusterError(
                f"the controller made no pass within {patience_s:g} s.",
                hint="See `raytide status` and `raytide doctor`.",
            )
        time.sleep(_POLL_S)
    return (folder / _ANSWER).read_text()


def _shared(seen: Snapshot) -> Snapshot:
    """Without what users configured and no decision looks at."""
    jobs = tuple(replace(job, spec=job.spec.model_copy(update={"config": {}})) for job in seen.jobs)
    endpoints = tuple(
        replace(view, endpoint=replace(view.endpoint, spec=view.endpoint.spec.model_copy(update={"engine": {}})))
        for view in seen.endpoints
    )
    return replace(seen, jobs=jobs, endpoints=endpoints)


def _written_ns(folder: Path) -> int:
    try:
        return (folder / _ANSWER).stat().st_mtime_ns
    except FileNotFoundError:
        return 0
