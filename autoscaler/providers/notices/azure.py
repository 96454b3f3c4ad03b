"""Azure's interruption notices, read from Scheduled Events. A spot eviction is announced 30 s before it happens, and
maintenance some minutes before.
"""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from typing import Any

from raytide.autoscaler.providers.notices.base import CloudNotice, MetadataService, read

_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_LEAVES = ("Preempt", "Terminate", "Redeploy", "Reboot")
"""The types of events that end the work on a machine. `Freeze` is none of them: it pauses the machine for seconds."""


class AzureMetadata:
    """Azure's metadata service. It lists the events of all machines of a scale set. Events of other machines are
    ignored.
    """

    def __init__(self, url: str = "") -> None:
        self._service = MetadataService(url or "http://169.254.169.254", {"Metadata": "true"})
        self._name = ""

    def pending_notice(self, now_s: float) -> CloudNotice | None:
        self._name = self._name or self._service.text(_NAME) or ""
        return read(self._service.text(_EVENTS) or "{}", lambda body: self._first(body.get("Events", []), now_s))

    def _first(self, events: list[dict[str, Any]], now_s: float) -> CloudNotice | None:
        own = [e for e in events if e["EventType"] in _LEAVES and self._name in e.get("Resources", [])]
        notices = [CloudNotice(_deadline_s(event, now_s), f"scheduled event {event['EventType']}") for event in own]
        return min(notices, key=lambda each: each.deadline_s, default=None)


def _deadline_s(event: dict[str, Any], now_s: float) -> float:
    """Returns the event's time; its `NotBefore` is empty once the event has begun."""
    return parsedate_to_datetime(event["NotBefore"]).timestamp() if event.get("NotBefore") else now_s
