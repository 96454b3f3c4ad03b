"""A served model in the SDK: wait for it, and call it with the official OpenAI client."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from raytide.control.client import ApiClient
from raytide.control.views import EndpointLogPart, EndpointStatus, RolloutStatus, from_json, to_json
from raytide.core.errors import ConflictError, DataError, EngineError, NotFoundError, UsageError, WaitTimeoutError
from raytide.core.io.environment import without_proxy
from raytide.core.io.html import framed, table
from raytide.core.logs import logger
from raytide.core.money import format_usd
from raytide.core.objects.endpoint import EndpointState
from raytide.core.objects.endpoint_load import LOADING
from raytide.core.specs.live_changes import AdapterChange, WeightsChange
from raytide.core.specs.rollout import Score
from raytide.dashboards.figures.over_time import over_time
from raytide.sdk.display import Glance, LiveView
from raytide.sdk.jobs.job_run import patiently

if TYPE_CHECKING:
    from openai import OpenAI

    from raytide.sdk.bench import BenchProgress, BenchReport

_POLL_S = 0.3
_WATCH_S = 1.0
_MOST_SHOWN = 600
_FEEDBACK_S = 30.0
_ASK_AGAIN = 2
"""The number of times that `logs` repeats the request for replicas whose node does not answer, because it is busy or
gone.
"""
_LOG = logger(__name__)


class EndpointHandle:
    """An endpoint with its last known state. `refresh`, `wait`, `watch` and `updates` renew the state."""

    def __init__(self, client: ApiClient, status: EndpointStatus) -> None:
        self._client = client
        self.status = status

    @property
    def name(self) -> str:
        return self.status.endpoint.name

    @property
    def base_url(self) -> str:
        """The `base_url` for OpenAI clients of this endpoint."""
        return self.status.base_url

    def refresh(self) -> EndpointHandle:
        self.status = self._client.endpoint(self.name)
        return self

    def _look(self) -> EndpointStatus:
        """Renews the state and returns it. Waits for an API that is being restarted."""
        return patiently(self.name, self.refresh).status

    def wait(self, *, replicas: int = 1, timeout_s: float = 600.0) -> EndpointHandle:
        """Blocks until this many replicas answer, and returns the endpoint. Meanwhile, the endpoint's progress is shown
        in a notebook or on a terminal.

        Raises EngineError if the endpoint fails, and WaitTimeoutError after `timeout_s` seconds.
        """
        with LiveView(is_shown=self.status.ready_replicas < replicas) as live:
            for _ in self.updates(replicas=replicas, timeout_s=timeout_s):
                live.show(partial(self.glance, replicas))
        return self

    def watch(self, *, for_s: float = 86_400.0) -> EndpointHandle:
        """Shows the endpoint live in a notebook or on a terminal: its replicas, requests and cost.

        Returns the endpoint after `for_s` seconds or an interrupt.
        """
        until_s, ongoing, ready = time.monotonic() + for_s, list[float](), list[float]()
        with LiveView() as live, suppress(KeyboardInterrupt):
            while (left_s := until_s - time.monotonic()) > 0:
                status = self._look()
                ongoing.append(status.ongoing)
                ready.append(status.ready_replicas)
                live.show(partial(self._glance_back, ongoing[-_MOST_SHOWN:], ready[-_MOST_SHOWN:]))
                time.sleep(min(_WATCH_S, left_s))
        return self

    def _glance_back(self, ongoing: list[float], ready: list[float]) -> Glance:
        curves = {"in flight": ongoing, "replicas": ready}
        title = f"endpoint {self.name}"
        now = self.glance(self.status.endpoint.target_replicas)
        return replace(now, curves=curves, picture=lambda: str(over_time(curves, title, every_s=_WATCH_S)))

    def glance(self, replicas: int = 1) -> Glance:
        """Returns the endpoint's state for a live view that waits until `replicas` replicas are ready."""
        status = self.status
        facts = {
            "state": str(status.endpoint.state),
            "replicas": f"{status.ready_replicas} of {status.endpoint.target_replicas}",
            "in flight": f"{status.ongoing:g}",
            "cost": format_usd(status.cost_micro_usd),
        }
        if status.waiting is not None:
            facts["why"] = status.waiting.reason
        for start in status.startups:
            if not start.is_ready and start.phases:
                phase, seconds = start.phases[-1]
                facts[start.id] = f"{phase} for {seconds:.0f} s"
        return Glance(f"endpoint {self.name}", float(status.ready_replicas), float(replicas), facts)

    def updates(self, *, replicas: int = 1, timeout_s: float = 600.0) -> Iterator[EndpointStatus]:
        """Polls the endpoint and yields each status, until `replicas` replicas answer.

        Raises EngineError if the endpoint fails, and WaitTimeoutError after `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while self._look().ready_replicas < replicas and self.status.endpoint.spec.backend is None:
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
        """Returns the official OpenAI client with this endpoint's address.

        The client's latencies are reported to the cluster's metrics, unless `options` contain an `http_client`.
        """
        from openai import OpenAI

        from raytide.sdk.serving.client_latency import LatencyReporter

        if "http_client" not in options:
            send = partial(self._client.call, "POST", f"/v1/endpoints/{self.name}/latency")
            options["http_client"] = LatencyReporter(send).http_client(self.base_url)
        return OpenAI(base_url=self.base_url, api_key=options.pop("api_key", "none"), **options)

    def logs(self, *, follow: bool = False, tail: int | None = None, grep: str = "") -> Iterator[str]:
        """Yields the lines that the endpoint's replicas have printed, including replicas that have ended. Each line
        begins with the replica's name.

        - `tail` limits the output of each replica to its last lines.
        - `grep` is a regular expression that a line must contain. Raises UsageError if it is malformed.
        - `follow` goes on until an interrupt.

        The output of a node that does not answer is requested again. If it stays missing, a warning on stderr says so.
        """
        try:
            wanted = re.compile(grep)
        except re.error as error:
            raise UsageError(f"{grep!r} is not a regular expression: {error}.") from None
        last: dict[str, object] = {} if tail is None else {"tail": tail}
        query, asked_again, told = last, 0, set[str]()
        while True:
            found = from_json(EndpointLogPart, self._client.call("GET", f"/v1/endpoints/{self.name}/logs", None, query))
            yield from (f"{line.replica} {line.text}" for line in found.lines if wanted.search(line.text))
            for why in sorted({*found.gone.values()} - told):
                replicas = ", ".join(sorted(name for name, each in found.gone.items() if each == why))
                _LOG.warning(f"The output of {replicas} is missing: {why}.")
            told.update(found.gone.values())
            query = {"after": found.after}
            if found.has_more:
                continue
            if not follow:
                if not found.missing:
                    return
                if asked_again == _ASK_AGAIN:
                    _LOG.warning(f"The output of {', '.join(found.missing)} is missing: the node does not answer.")
                    return
                query, asked_again = {**query, **last}, asked_again + 1
            time.sleep(_WATCH_S)

    def report(self, **signals: float) -> None:
        """Reports values of the signals in `replicas.scale_on`, such as `report(queue=120)`. A value counts for five
        minutes.

        Raises NotFoundError for a signal that the endpoint does not scale on.
        """
        self._client.call("POST", f"/v1/endpoints/{self.name}/signals", signals)

    def feedback(
        self, request_id: str, score: Score | None = None, comment: str = "", *, api_key: str = "none", **metrics: float
    ) -> int:
        """Stores a judgement of the answer with this response id: "up" or "down", or values of your own metrics, as in
        `feedback(id, accepted=1.0)`. Returns the revision that gave the answer.

        A later judgement replaces an earlier one of the same metric. Raises NotFoundError for a request that has not
        ended or does not belong to the team of the API key, and EngineError if the judgement is refused.
        """
        given: list[dict[str, object]] = [{"metric": name, "value": value} for name, value in metrics.items()]
        if score is not None or comment or not metrics:
            given.append({"score": score, "comment": comment})
        return [self._judge({"request_id": request_id, **each}, api_key) for each in given][-1]

    def _judge(self, body: dict[str, object], api_key: str) -> int:
        import httpx

        headers = {"Authorization": f"Bearer {api_key}"}
        with httpx.Client(headers=headers, timeout=_FEEDBACK_S, mounts=without_proxy(self.base_url)) as gateway:
            answer = gateway.post(f"{self.base_url}/feedback", json=body)
        if answer.status_code == NotFoundError.http_status:
            raise NotFoundError(answer.json()["error"]["message"], hint="Send the id of an answer that has ended.")
        if not answer.is_success:
            raise EngineError(f"the judgement was refused: {answer.text[:500]}")
        return int(answer.json()["revision"])

    def bench(
        self, *, api_key: str = "", on_progress: Callable[[BenchProgress], None] | None = None, **options: Any
    ) -> BenchReport:
        """Sends a load to the endpoint and returns the report: time to first token, inter-token latency, throughput and
        goodput.

        The options are the fields of `raytide.sdk.bench.BenchSpec`, such as `concurrency=16`, or `rate=4.0,
        poisson=True`, or `slo="ttft=300ms"`. The default SLO is the endpoint's own. A keyboard interrupt ends the load
        early, and the report then covers the requests sent so far.
        """
        from raytide.sdk.bench import BenchSpec, LoadGenerator

        slo = {"ttft_s": self.status.endpoint.spec.replicas.slo_ttft_s}
        fields = {"base_url": self.base_url, "model": self.name, "slo": slo, **options}
        return LoadGenerator(BenchSpec.parse(fields, where="bench"), api_key=api_key).run(on_progress)

    def rollout(self) -> RolloutStatus | None:
        """Returns the endpoint's last rollout. Returns None if it never had one."""
        found = self._client.rollouts(self.name, limit=1)
        return found[0] if found else None

    def promote(self, why: str = "") -> RolloutStatus:
        """Promotes the challenger of the running rollout. The challenger serves alone once it has enough replicas."""
        return self._client.end_rollout(self.name, "promote", why)

    def stop_rollout(self, why: str = "") -> RolloutStatus:
        """Ends the running rollout. The champion then serves alone."""
        return self._client.end_rollout(self.name, "stop", why)

    def load_adapter(self, name: str, location: str, *, timeout_s: float = 600.0) -> EndpointHandle:
        """Loads a LoRA adapter on all replicas, and blocks until they have it. Requests address it as the model
        `ENDPOINT:NAME`.

        `location` is a directory, a URL or a registered model. Raises DataError if a replica cannot load the adapter,
        and WaitTimeoutError after `timeout_s` seconds.
        """
        self.status = self._client.change_adapters(self.name, AdapterChange(load={name: location}))
        return self.wait_for_adapters(timeout_s=timeout_s)

    def unload_adapter(self, name: str) -> EndpointHandle:
        """Unloads a LoRA adapter. Requests that already use it still finish."""
        self.status = self._client.change_adapters(self.name, AdapterChange(unload=(name,)))
        return self

    def swap_weights(self, location: str, *, timeout_s: float = 1800.0) -> EndpointHandle:
        """Replaces the endpoint's weights by others of the same architecture, one replica after the other. Blocks until
        all replicas have the new weights.

        No request fails meanwhile, and running requests continue with the new weights. `location` is a directory, a URL
        or a registered model, or "" for the weights with which the endpoint was created. If a replica refuses the new
        weights, the endpoint returns to its previous weights and ConflictError is raised. After `timeout_s` seconds,
        WaitTimeoutError is raised, and the swap goes on.
        """
        before = self.refresh().status.endpoint.spec.weights
        self.status = self._client.change_weights(self.name, WeightsChange(location=location))
        deadline, wanted = time.monotonic() + timeout_s, self.status.endpoint.spec.weights
        while True:
            live = self._look().live
            if error := next((each.error for each in live if each.error and each.asked == wanted), ""):
                self.status = self._client.change_weights(self.name, WeightsChange(location=before))
                raise ConflictError(f"endpoint {self.name}: {error}", hint="It keeps the weights that it had.")
            if len(live) >= self.status.ready_replicas and all(each.weights == wanted for each in live):
                return self
            if time.monotonic() > deadline:
                raise WaitTimeoutError(f"endpoint {self.name}: weights are still being swapped after {timeout_s:g} s.")
            time.sleep(_POLL_S)

    def adapters(self) -> dict[str, list[str]]:
        """Returns, for each adapter name, a list with the adapter's state on each replica that answers.

        The state is "" if the adapter is loaded, `loading`, or an error message.
        """
        names = sorted(self.status.endpoint.spec.adapters)
        return {name: [each.adapters.get(name, LOADING) for each in self.status.live] for name in names}

    def wait_for_adapters(self, *, timeout_s: float = 600.0) -> EndpointHandle:
        """Blocks until every replica that answers has loaded all adapters. Raises DataError if a replica fails to load
        one, and WaitTimeoutError after `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._look()
            states = self.adapters()
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
        return framed(table(f"endpoint {self.name}", ("", ""), rows))


def endpoint_row(handle: EndpointHandle) -> tuple[object, ...]:
    """Returns the row of an endpoint for a table of endpoints."""
    status = handle.status
    replicas = f"{status.ready_replicas} of {status.endpoint.target_replicas}"
    cost = format_usd(status.cost_micro_usd)
    return handle.name, status.endpoint.state, replicas, f"{status.ongoing:g}", cost, status.base_url
