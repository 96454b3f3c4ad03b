"""The gateway's calls to the control API, with the gateway's own token."""

from __future__ import annotations

from typing import Any

import httpx
from pydantic import TypeAdapter

from raytide.core import errors
from raytide.core.errors import ClusterError
from raytide.core.objects.api_key import KeyTableChange, ReservationBatch, UsageBatch
from raytide.core.specs.rollout import Feedback, RolloutReport

_TIMEOUT_S = 10.0
_KEY_TABLE = TypeAdapter(KeyTableChange)


class ControlApi:
    """A client for one event loop. Its methods raise the API's errors, and ClusterError if there is no answer."""

    def __init__(
        self, address: str, token: str, gateway: str, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.gateway = gateway
        """The name of this gateway process, unique among all that ever ran."""
        headers = {"Authorization": f"Bearer {token}"}
        self._http = httpx.AsyncClient(base_url=address, headers=headers, transport=transport, trust_env=False)

    async def key_table(self, newer_than: int, timeout_s: float) -> KeyTableChange:
        """Returns the changes after the revision `newer_than`: as soon as there is one, or after `timeout_s`
        seconds."""
        query = {"newer_than": newer_than, "timeout_s": timeout_s, "gateway": self.gateway}
        found = await self._call("GET", "/v1/gateway/keys", params=query, timeout=timeout_s + _TIMEOUT_S)
        return _KEY_TABLE.validate_python(found)

    async def key_changes(self, newer_than: int) -> KeyTableChange:
        """Returns the changes after this revision at once. Unlike `key_table`, the call does not report this gateway as
        present.
        """
        query = {"newer_than": newer_than, "timeout_s": 0.0}
        found = await self._call("GET", "/v1/gateway/keys", params=query, timeout=_TIMEOUT_S)
        return _KEY_TABLE.validate_python(found)

    async def reserve(self, batch: ReservationBatch, timeout_s: float) -> dict[str, str]:
        """Returns the refusal of each reservation by its id; empty if it is granted."""
        body = batch.model_dump(mode="json")
        answer: dict[str, str] = await self._call("POST", "/v1/gateway/reservations", json=body, timeout=timeout_s)
        return answer

    async def settle(self, batch: UsageBatch) -> None:
        """Reports requests. Requests that were reported before are not billed again."""
        await self._call("POST", "/v1/gateway/usage", json=batch.model_dump(mode="json"), timeout=_TIMEOUT_S)

    async def report_rollouts(self, report: RolloutReport) -> None:
        """Reports totals of the revisions of rollouts."""
        await self._call("POST", "/v1/gateway/rollouts", json=report.model_dump(mode="json"), timeout=_TIMEOUT_S)

    async def save_feedback(self, feedback: Feedback) -> int:
        """Stores a judgement; returns the revision that gave the answer. Raises NotFoundError for an unknown
        request."""
        body = feedback.model_dump(mode="json")
        answer = await self._call("POST", "/v1/gateway/feedback", json=body, timeout=_TIMEOUT_S)
        return int(answer["revision"])

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(self, method: str, path: str, **kwargs: Any) -> Any:
        try:
            response = await self._http.request(method, path, **kwargs)
            answer = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise ClusterError(f"the control API does not answer: {error or type(error).__name__}.") from None
        if response.is_success:
            return answer
        body = answer.get("error") if isinstance(answer, dict) else None
        raise errors.from_json(body if isinstance(body, dict) else {})
