"""The notice board: watchers store their notices in Ray's GCS, where the controller reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from raytide.autoscaler.providers.base import Notice
from raytide.autoscaler.providers.notices.base import CloudNotice
from raytide.core.errors import ClusterError
from raytide.core.ray_internals import GcsClient

__all__ = ["NoticeBoard"]

_NAMESPACE, _PREFIX = b"raytide", b"notice/"
_TIMEOUT_S = 5.0


class NoticeBoard:
    """The notices of all nodes, stored in Ray's GCS.

    `connect` returns a GCS client; it is called again after any error, so that a restarted GCS is found.
    """

    def __init__(self, connect: Callable[[], GcsClient]) -> None:
        self._connect = connect
        self._client: GcsClient | None = None

    def pin(self, node_id: str, notice: CloudNotice) -> None:
        body = json.dumps(asdict(notice)).encode()
        self._call(lambda gcs: gcs.internal_kv_put(_PREFIX + node_id.encode(), body, True, _NAMESPACE, _TIMEOUT_S))

    def remove(self, node_id: str) -> None:
        self._call(lambda gcs: gcs.internal_kv_del(_PREFIX + node_id.encode(), False, _NAMESPACE, _TIMEOUT_S))

    def notices(self) -> tuple[Notice, ...]:
        keys = self._call(lambda gcs: gcs.internal_kv_keys(_PREFIX, _NAMESPACE, _TIMEOUT_S))
        if not keys:
            return ()
        bodies = self._call(lambda gcs: gcs.internal_kv_multi_get(keys, _NAMESPACE, _TIMEOUT_S))
        notices = {
            key.decode().removeprefix(_PREFIX.decode()): CloudNotice(**json.loads(body)) for key, body in bodies.items()
        }
        return tuple(Notice(node_id, each.deadline_s) for node_id, each in sorted(notices.items()))

    def _call(self, ask: Callable[[GcsClient], Any]) -> Any:
        try:
            self._client = self._client or self._connect()
            return ask(self._client)
        except Exception as error:  # Ray raises RpcError, ConnectionError and bare RuntimeErrors here
            self._client = None
            raise ClusterError(f"Ray's GCS does not answer: {error}", hint="Is the head up?") from error
