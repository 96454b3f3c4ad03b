"""The start of a replica, phase by phase. The replica publishes the phases in the GCS, and the controller reads them.

The phases, in order:

- `node` ends when a node runs a worker process for the replica.
- `process` (environment, image) ends when that worker process runs raytide's code.
- `stage` ends when the model is on the node.
- `load` and `warm-up` happen in the engine's process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping

from raytide.core.objects.endpoint_load import ReplicaStartup

READY = "ready"
_PROGRESS_S = 1.0


class StartupLog:
    """Publishes the phases of this replica's start. `put` is a function that stores a value in the GCS."""

    def __init__(self, put: Callable[[bytes], object], process_at_s: float) -> None:
        self._put = put
        self._phases: list[tuple[str, float]] = [("process", process_at_s)]
        self._detail = ""
        self._told_s = 0.0

    def begin(self, phase: str) -> None:
        """Records and publishes that `phase` begins. The previous phase has thereby ended."""
        self._phases.append((phase, time.time()))
        self._publish()

    def progress(self, done: int, total: int) -> None:
        """Publishes how many bytes of the model have been copied. Publishes at most once a second."""
        if time.monotonic() - self._told_s > _PROGRESS_S:
            self._told_s = time.monotonic()
            self._detail = f"{done / 1e9:.2f} of {total / 1e9:.2f} GB"
            self._publish()

    def staged(self, copied: int) -> None:
        """Records the total number of copied bytes. The next call of `begin` publishes the number."""
        self._detail = f"{copied / 1e9:.2f} GB copied" if copied else ""

    def _publish(self) -> None:
        self._put(json.dumps({"phases": self._phases, "detail": self._detail}).encode())


def startup_of(replica: str, ordered_at_s: float, published: bytes | None, now_s: float) -> ReplicaStartup:
    """Returns the startup phases of a replica that Serve ordered at `ordered_at_s`. A replica that has published
    nothing is in the phase `node`.
    """
    report: Mapping[str, object] = json.loads(published) if published else {}
    phases = report.get("phases")
    begun = [("node", ordered_at_s), *(phases if isinstance(phases, list) else [])]
    ends = [*(float(at_s) for _, at_s in begun[1:]), now_s]
    is_ready = begun[-1][0] == READY
    return ReplicaStartup(
        id=replica,
        ordered_at_s=ordered_at_s,
        phases=tuple(
            (str(name), max(0.0, end_s - max(float(at_s), ordered_at_s)))
            for (name, at_s), end_s in zip(begun, ends, strict=True)
            if name != READY
        ),
        is_ready=is_ready,
        detail=str(report.get("detail", "")),
    )
