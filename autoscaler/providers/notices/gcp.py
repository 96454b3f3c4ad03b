"""GCP's interruption notices.

GCP announces a spot preemption 30 s ahead. For a machine that cannot migrate, GCP also announces host maintenance,
up to an hour ahead.
"""

from __future__ import annotations

import os

from raytide.autoscaler.providers.notices.base import CloudNotice, MetadataService

PREEMPTED_S = 30.0
MAINTENANCE_S = 60.0
"""The shortest time that Compute Engine gives; machines with GPUs have an hour, but the event does not say so."""

_INSTANCE = "/computeMetadata/v1/instance"


class GcpMetadata:
    """GCP's metadata service. Its events carry no timestamp. Therefore a deadline is counted from the moment at which
    this watcher first saw the event.
    """

    def __init__(self, url: str = "") -> None:
        """If `url` is empty, GCE_METADATA_HOST is used, as in Google's own tools."""
        host = os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
        self._service = MetadataService(url or f"http://{host}", {"Metadata-Flavor": "Google"})
        self._since_s: dict[str, float] = {}

    def pending_notice(self, now_s: float) -> CloudNotice | None:
        if self._service.text(f"{_INSTANCE}/preempted") == "TRUE":
            return CloudNotice(self._since("preempted", now_s) + PREEMPTED_S, "preempted")
        event = self._service.text(f"{_INSTANCE}/maintenance-event") or "NONE"
        if event.startswith("TERMINATE"):  # MIGRATE_ON_HOST_MAINTENANCE keeps it running
            return CloudNotice(self._since(event, now_s) + MAINTENANCE_S, f"maintenance-event {event}")
        return None

    def _since(self, event: str, now_s: float) -> float:
        return self._since_s.setdefault(event, now_s)
