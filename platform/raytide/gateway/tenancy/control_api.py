"""The calls that the gateway makes to the control API, with the gateway's own token."""

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
    """A client of the control API for use in one event loop.

    Its methods raise the errors that the API returns. They raise ClusterError if the API does not answer.
    """

    def __init__(
        self, address: str, token: str, gateway: str, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.gateway = gateway
        """The name of this gateway process, unique among all that ever ran."""
        headers = {"Authorization": f"Bearer {token}"}
        self._http = httpx.AsyncClient(base_url=address, headers=headers, transport=transport, trust_env=False)

    async def key_table(self, newer_than: int, timeout_s: float) -> KeyTableChange:
        """Returns the changes of the key table after the revision `newer_than`.

        Waits up to `timeout_s` seconds for a change.
        """
        query = {"newer_than": newer_than, "timeout_s": timeout_s, "gateway": self.gateway}
        found = await self._call("GET", "/v1/gateway/keys", params=query, timeout=timeout_s + _TIMEOUT_S)
        return _KEY_TABLE.validate_python(found)

    async def key_changes(self, newer_than: int) -> KeyTableChange:
        """Returns the changes of the key table after the revision `newer_than`, without waiting.

        Unlike `key_table`, this call does not tell the API that this gateway is alive.
        """
        query = {"newer_than": newer_than, "timeout_s": 0.0}
        found = await self._call("GET", "/v1/gateway/keys", params=query, timeout=_TIMEOUT_S)
        return _KEY_TABLE.validate_python(found)

    async def reserve(self, batch: ReservationBatch, timeout_s: float) -> dict[str, str]:
        """Reserves parts of budgets. Returns the outcome of each reservation by its id: "" if it is granted, else the
        reason for the refusal.
        """
        body = batch.model_dump(mode="json")
        answer: dict[str, str] = await self._call("POST", "/v1/gateway/reservations", json=body, timeout=timeout_s)
        return answer

    async def settle(self, batch: UsageBatch) -> None:
        """Reports finished requests for billing. A request that was reported before is not billed again."""
        await self._call("POST", "/v1/gateway/usage", json=batch.model_dump(mode="json"), timeout=_TIMEOUT_S)

    async def report_rollouts(self, report: RolloutReport) -> None:
        """Reports the request totals of revisions that take part in rollouts."""
        await self._call("POST", "/v1/gateway/rollouts", json=report.model_dump(mode="json"), timeout=_TIMEOUT_S)

    async def save_feedback(self, feedback: Feedback) -> int:
        """Stores a user's judgement of an answer. Returns the revision that gave the answer.

        Raises NotFoundError for an unknown request.
        """
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
