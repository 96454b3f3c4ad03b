"""The watcher of one node: `python -m raytide.autoscaler.providers.notices.watch CLOUD NODE_ID GCS_ADDRESS`.

It polls the cloud's metadata service every two seconds, and writes a pending notice into Ray's GCS at each poll.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict

from raytide.autoscaler.providers.base import Notice
from raytide.autoscaler.providers.notices.aws import AwsMetadata
from raytide.autoscaler.providers.notices.azure import AzureMetadata
from raytide.autoscaler.providers.notices.base import CloudNotice, Metadata
from raytide.autoscaler.providers.notices.gcp import GcpMetadata
from raytide.autoscaler.ray_gcs import GcsEntries
from raytide.core.clock import Clock, SystemClock
from raytide.core.errors import ClusterError
from raytide.core.logs import log_to, logger
from raytide.core.ray_internals import GcsClient, gcs_client

CLOUDS: Mapping[str, Callable[[], Metadata]] = {"aws": AwsMetadata, "gcp": GcpMetadata, "azure": AzureMetadata}
"""The metadata service of each cloud, by Ray's name of the provider."""

_EVERY_S = 2.0

log = logger(__name__)


class NoticeBoard:
    """The interruption notices of all nodes, stored in Ray's GCS. Each node's watcher writes its notice, and the
    controller reads the notices.
    """

    def __init__(self, connect: Callable[[], GcsClient]) -> None:
        self._entries = GcsEntries("notice/", connect)

    def pin(self, node_id: str, notice: CloudNotice) -> None:
        self._entries.put(node_id, json.dumps(asdict(notice)).encode())

    def remove(self, node_id: str) -> None:
        self._entries.remove(node_id)

    def notices(self) -> tuple[Notice, ...]:
        notices = {node_id: CloudNotice(**json.loads(body)) for node_id, body in self._entries.all().items()}
        return tuple(Notice(node_id, each.deadline_s) for node_id, each in sorted(notices.items()))


class NoticeWatcher:
    """Polls a cloud for interruption notices about this node, and writes them to the NoticeBoard.

    Each call of `look` polls once. A failed poll is logged. The next call of `look` polls again.
    """

    def __init__(self, node_id: str, metadata: Metadata, board: NoticeBoard, clock: Clock) -> None:
        self._node_id, self._metadata, self._board, self._clock = node_id, metadata, board, clock
        self._last: CloudNotice | str | None = None

    def look(self) -> CloudNotice | None:
        try:
            notice = self._metadata.pending_notice(self._clock.now_s())
            if notice is not None:
                self._board.pin(self._node_id, notice)  # each time, since a restarted GCS has lost it
        except ClusterError as error:
            self._say(str(error))
            return None
        self._say(notice)
        return notice

    def _say(self, now: CloudNotice | str | None) -> None:
        """Logs a message if it differs from the last one."""
        if now != self._last:
            log.info("cloud notice", extra={"node": self._node_id, "notice": "none" if now is None else str(now)})
        self._last = now


def board_at(gcs_address: str) -> NoticeBoard:
    return NoticeBoard(lambda: gcs_client(gcs_address))


def main(cloud: str, node_id: str, gcs_address: str) -> None:
    log_to()
    clock = SystemClock()
    watch = NoticeWatcher(node_id, CLOUDS[cloud](), board_at(gcs_address), clock)
    while True:
        watch.look()
        clock.sleep(_EVERY_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
