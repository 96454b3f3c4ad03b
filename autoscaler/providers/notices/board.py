"""The notice board: watchers store their notices in Ray's GCS, where the controller reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

from raytide.autoscaler.providers.base import Notice
from raytide.autoscaler.providers.notices.base import CloudNotice
from raytide.autoscaler.ray_gcs import GcsEntries
from raytide.core.ray_internals import GcsClient

__all__ = ["NoticeBoard"]


class NoticeBoard:
    """The notices of all nodes, stored in Ray's GCS."""

    def __init__(self, connect: Callable[[], GcsClient]) -> None:
        self._entries = GcsEntries("notice/", connect)

    def pin(self, node_id: str, notice: CloudNotice) -> None:
        self._entries.put(node_id, json.dumps(asdict(notice)).encode())

    def remove(self, node_id: str) -> None:
        self._entries.remove(node_id)

    def notices(self) -> tuple[Notice, ...]:
        notices = {node_id: CloudNotice(**json.loads(body)) for node_id, body in self._entries.all().items()}
        return tuple(Notice(node_id, each.deadline_s) for node_id, each in sorted(notices.items()))
