"""A served model in the SDK: wait for it, and talk to it with the official client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from raytide.control.client import ApiClient
from raytide.control.views import EndpointStatus, RolloutStatus, html_table, to_json
from raytide.core.errors import ConflictError, DataError, EngineError, NotFoundError, WaitTimeoutError
from raytide.core.money import format_usd
from raytide.core.objects.endpoint import LOADING, EndpointState
from raytide.core.specs.live_changes import AdapterChange, WeightsChange
from raytide.core.specs.rollout import Score

if TYPE_CHECKING:
    from openai import OpenAI

_POLL_S = 0.3
_FEEDBACK_S = 30.0


class EndpointHandle:
    """An endpoint in its last known state; `refresh` and `wait` update it."""

    def __init__(self, client: ApiClient, status: EndpointStatus) -> None:
        self._client = client
        self.status = status

    @property
    def name(self) -> str:
        return self.status.endpoint.name

    @property
    def base_url(self) -> str:
        """The `base_url` for OpenAI clients."""
        return self.status.base_url

    def refresh(self) -> EndpointHandle:
        self.status = self._client.endpoint(self.name)
        return self

    def wait(self, *, replicas: int = 1, timeout_s: float = 600.0) -> EndpointHandle:
        """Blocks until this many replicas answer and returns the endpoint. Raises EngineError or WaitTimeoutError."""
        for _ in self.watch(replicas=replicas, timeout_s=timeout_s):
            pass
        return self

    def watch(self, *, replicas: int = 1, timeout_s: float = 600.0) -> Iterator[EndpointStatus]:
        """Yields the endpoint's status at each poll, until this many replicas answer."""
        deadline = time.monotonic() + timeout_s
        while self.refresh().status.ready_replicas < replicas and self.status.endpoint.spec.backend is None:
            if self.status.endpoint.state is EndpointState.FAILED:
                raise EngineError(f"endpoint {self.name} failed: {self.status.endpoint.reason}")
            if time.monotonic() > deadline:
                waiting = self.status.waiting
                raise WaitTimeoutError(
                    f"endpoint {self.name}: {self.status.ready_replicas} of {replicas} replicas after {timeout_s:g} s.",
                    hint=waiting.reason if waiting else "`raytide status` shows the nodes.",
                )
            yield self.status
            time.sleep(_POLL_S)

    def openai(self, **options: Any) -> OpenAI:
        """Returns the official OpenAI client with this endpoint's address."""
        from openai import OpenAI

        return OpenAI(base_url=self.base_url, api_key=options.pop("api_key", "none"), **options)

    def feedback(self, request_id: str, score: Score, comment: str = "", *, api_key: str = "none") -> int:
        """Judges an answer by its id, up or down; returns the revision that gave it.

        Raises NotFoundError for a request that is not of the key's team.
        """
        import httpx

        body = {"request_id": request_id, "score": score, "comment": comment}
        headers = {"Authorization": f"Bearer {api_key}"}
        answer = httpx.post(f"{self.base_url}/feedback", json=body, headers=headers, timeout=_FEEDBACK_S)
        if answer.status_code == NotFoundError.http_status:
            raise NotFoundError(answer.json()["error"]["message"], hint="Send the id of an answer that has ended.")
        if not answer.is_success:
            raise EngineError(f"the judgement was refused: {answer.text[:500]}")
        return int(answer.json()["revision"])

    def rollout(self) -> RolloutStatus | None:
        """Returns the endpoint's last rollout; None if it never had one."""
        found = self._client.rollouts(self.name, limit=1)
        return found[0] if found else None

    def promote(self, why: str = "") -> RolloutStatus:
        """Lets the challenger of the rollout that runs serve alone, once it has the replicas for it."""
        return self._client.end_rollout(self.name, "promote", why)

    def stop_rollout(self, why: str = "") -> RolloutStatus:
        """Ends the rollout that runs: the champion serves alone again."""
        return self._client.end_rollout(self.name, "stop", why)

    def load_adapter(self, name: str, location: str, *, timeout_s: float = 600.0) -> EndpointHandle:
        """Loads an adapter on all replicas, addressed as the model `ENDPOINT:NAME`, and blocks until they have it.

        `location` is a directory, a URL or a registered model. Raises DataError if a replica cannot load it.
        """
        self.status = self._client.change_adapters(self.name, AdapterChange(load={name: location}))
        return self.wait_for_adapters(timeout_s=timeout_s)

    def unload_adapter(self, name: str) -> EndpointHandle:
        """Unloads an adapter; requests that use it finish."""
        self.status = self._client.change_adapters(self.name, AdapterChange(unload=(name,)))
        return self

    def swap_weights(self, location: str, *, timeout_s: float = 1800.0) -> EndpointHandle:
        """Serves other weights of the same architecture, and blocks until all replicas do, one after the other.

        No request fails meanwhile; those that run continue with the new weights. `location` is a directory, a URL or a
        registered model, "" for the weights that the endpoint was created with. If a replica refuses them, those before
        come back, and ConflictError is raised.
        """
        before = self.refresh().status.endpoint.spec.weights
        self.status = self._client.change_weights(self.name, WeightsChange(location=location))
        deadline, wanted = time.monotonic() + timeout_s, self.status.endpoint.spec.weights
        while True:
            live = self.refresh().status.live
            if error := next((each.error for each in live if each.error and each.asked == wanted), ""):
                self.status = self._client.change_weights(self.name, WeightsChange(location=before))
                raise ConflictError(f"endpoint {self.name}: {error}", hint="It keeps the weights that it had.")
            if len(live) >= self.status.ready_replicas and all(each.weights == wanted for each in live):
                return self
            if time.monotonic() > deadline:
                raise WaitTimeoutError(f"endpoint {self.name}: weights are still being swapped after {timeout_s:g} s.")
            time.sleep(_POLL_S)

    def adapters(self) -> dict[str, list[str]]:
        """Returns the adapters by name, each with its state on every replica that answers: "" for a loaded one,
        `loading`, or the error.
        """
        names = sorted(self.status.endpoint.spec.adapters)
        return {name: [each.adapters.get(name, LOADING) for each in self.status.live] for name in names}

    def wait_for_adapters(self, *, timeout_s: float = 600.0) -> EndpointHandle:
        """Blocks until every replica that answers has all adapters. Raises DataError with the first error."""
        deadline = time.monotonic() + timeout_s
        while True:
            states = self.refresh().adapters()
            seen = [state for each in states.values() for state in each]
            if error := next((state for state in seen if state not in ("", LOADING)), ""):
                raise DataError(f"endpoint {self.name}: {error}", hint="Unload the adapter, or load another one.")
            known = {each.id for each in self.status.live}
            if not states or (len(known) >= max(1, self.status.ready_replicas) and not any(seen)):
                return self
            if time.monotonic() > deadline:
                raise WaitTimeoutError(f"endpoint {self.name}: adapters are still loading after {timeout_s:g} s.")
            time.sleep(_POLL_S)

    def delete(self) -> None:
        self.status = self._client.delete_endpoint(self.name)

    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = to_json(self.status)
        return value

    def __repr__(self) -> str:
        return f"EndpointHandle({self.name}, {self.status.endpoint.state}, {self.base_url})"

    def _repr_html_(self) -> str:
        rows = [
            ("state", self.status.endpoint.state),
            ("replicas", f"{self.status.ready_replicas} of {self.status.endpoint.target_replicas}"),
            ("requests in flight", f"{self.status.ongoing:g}"),
            ("url", self.base_url),
            ("cost", format_usd(self.status.cost_micro_usd)),
        ]
        return html_table(f"endpoint {self.name}", ("", ""), rows)
