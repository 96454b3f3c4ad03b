"""AWS's interruption notices, read through IMDSv2. A spot interruption is announced two minutes ahead. A rebalance
recommendation comes earlier, but AWS does not always send one.
"""

from __future__ import annotations

import os
from datetime import datetime

import httpx

from raytide.autoscaler.providers.notices.base import CloudNotice, MetadataService, read

REBALANCE_S = 600.0
"""The time that work gets to move after a recommendation, which has no deadline."""

_TOKEN_TTL_S = 21_600
_SPOT = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


class AwsMetadata:
    def __init__(self, url: str = "") -> None:
        """If `url` is empty, AWS_EC2_METADATA_SERVICE_ENDPOINT is used, as in AWS's own tools."""
        url = url or os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "") or "http://169.254.169.254"
        self._service = MetadataService(url)
        self._token = ""  # fetched later  # nosec B105

    def pending_notice(self, now_s: float) -> CloudNotice | None:
        if (action := self._read(_SPOT)) is not None:
            return read(
                action, lambda body: CloudNotice(_seconds(body["time"]), f"spot/instance-action {body['action']}")
            )
        if (recommended := self._read(_REBALANCE)) is not None:
            at_s = read(recommended, lambda body: _seconds(body["noticeTime"]))
            return CloudNotice(at_s + REBALANCE_S, "a rebalance recommendation")
        return None

    def _read(self, path: str) -> str | None:
        """Returns the text at a path, None if there is none. Renews the session token when it has expired."""
        if self._token:
            answer = self._service.get(path, {"X-aws-ec2-metadata-token": self._token})
            if answer is None or answer.status_code != httpx.codes.UNAUTHORIZED:
                return None if answer is None else self._service.checked(answer)
        ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
        self._token = self._service.text("/latest/api/token", ttl, method="PUT") or ""
        return self._service.text(path, {"X-aws-ec2-metadata-token": self._token})


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
