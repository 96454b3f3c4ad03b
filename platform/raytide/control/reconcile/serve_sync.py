"""Deploys the endpoints' records to Ray Serve, in a separate thread, because a deployment takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from raytide.actors.serving.ray_serve.control import ServeControl
from raytide.control.reconcile.observation import ClusterObservation
from raytide.core.logs import logger
from raytide.core.objects.endpoint import UPDATE_FAILED, Endpoint, EndpointState
from raytide.registry.rollout.routes import EndpointRoute

log = logger(__name__)

_NODE_DIED = "its node has died"
"""The message with which Ray reports a dead node. Serve blames the model for a replica that dies with its node during
its start.
"""


@dataclass(frozen=True, slots=True)
class ServeObservation:
    """The findings of the last pass of ServeSync."""

    gone: frozenset[tuple[str, float]] = frozenset()
    """Deleted endpoints that are gone from Serve, by name and creation time, because names are reused."""
    failures: Mapping[tuple[str, float], str] = field(default_factory=dict)
    """The errors of endpoints whose deployment Serve gave up, by name and creation time, because an endpoint that
    failed is created anew when it is served again."""
    unseen: Mapping[str, str] = field(default_factory=dict)
    """The errors of endpoints whose state is unknown."""

    @property
    def errors(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.unseen.values()))


class ServeSync:
    """Runs passes, one at a time. A pass makes Ray Serve match the endpoints' records. `check_lead` is called before
    each change, and raises once another controller leads.
    """

    def __init__(self, control: ServeControl, check_lead: Callable[[], None] = lambda: None) -> None:
        self._control, self._check_lead = control, check_lead
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="serving")
        self._pass: Future[ServeObservation] | None = None
        self._published: dict[str, int] = {}
        self._routes: dict[str, EndpointRoute] = {}
        self.served: ServeObservation | None = None
        """None before the first pass has finished."""

    def sync(self, endpoints: Iterable[Endpoint], routes: Mapping[str, EndpointRoute] = MappingProxyType({})) -> None:
        """Starts a pass, unless the previous pass still runs. If the previous pass has ended, first stores its result
        in `served`. Endpoints with an unreadable spec keep running until they are deleted.
        """
        if self._pass is not None:
            if not self._pass.done():
                return
            self.served = self._pass.result()
            self._pass = None
        wanted = tuple(endpoint for endpoint in endpoints if _is_wanted(endpoint))
        if wanted:
            self._pass = self._pool.submit(self._run_pass, wanted, dict(routes))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run_pass(self, endpoints: tuple[Endpoint, ...], routes: Mapping[str, EndpointRoute]) -> ServeObservation:
        """Syncs all endpoints, for which it lists Serve's applications once, and returns the result."""
        gone: set[tuple[str, float]] = set()
        failures: dict[tuple[str, float], str] = {}
        unseen: dict[str, str] = {}
        try:
            self._check_lead()
            there = self._control.applications()
            if not there:  # avoids a log line of Serve on each pass
                self._control.start()
            self._publish_routes(routes)  # first: whoever is deleted below gets no requests any more
        except Exception as error:  # Serve may raise anything; the next pass retries
            log.warning("serving pass failed", extra={"error": str(error)})
            return ServeObservation(unseen={endpoint.name: f"Ray Serve: {error}" for endpoint in endpoints})
        for endpoint in endpoints:
            seen = there.get(endpoint.name)
            try:
                self._check_lead()
                if endpoint.state is EndpointState.DELETING:
                    self._control.delete(endpoint.name, is_there=seen is not None)
                    self._published.pop(endpoint.name, None)
                    if seen is None:
                        gone.add((endpoint.name, endpoint.created_at_s))
                elif not self._sync_endpoint(endpoint, is_there=seen is not None) and seen is not None:
                    if _NODE_DIED in seen.failure:
                        # Deployed again, it has a fresh failure count. Replicas of its earlier spec serve on.
                        self._control.deploy(endpoint, is_there=False)
                    elif seen.failure:
                        failures[endpoint.name, endpoint.created_at_s] = seen.failure
            except Exception as error:  # must not affect other endpoints
                log.warning("endpoint failed", extra={"endpoint": endpoint.name, "error": str(error)})
                unseen[endpoint.name] = f"endpoint {endpoint.name}: {error}"
        return ServeObservation(frozenset(gone), failures, unseen)

    def _publish_routes(self, routes: Mapping[str, EndpointRoute]) -> None:
        for name, route in routes.items():
            if self._routes.get(name) != route:
                self._control.publish_route(name, route.model_dump_json().encode())
                self._routes[name] = route

    def _sync_endpoint(self, endpoint: Endpoint, *, is_there: bool) -> bool:
        """Deploys and scales one endpoint. Returns whether it was just deployed, which makes its earlier status
        stale."""
        is_new = self._control.deploy(endpoint, is_there=is_there)
        if self._published.get(endpoint.name) != endpoint.target_replicas:
            self._control.publish(endpoint.name, endpoint.target_replicas)
            self._published[endpoint.name] = endpoint.target_replicas
        return is_new


def follow_serve(
    endpoint: Endpoint, observed: ClusterObservation, served: ServeObservation | None, now_s: float
) -> Endpoint:
    """Returns the endpoint with its state updated from Serve's reports."""
    if endpoint.unreadable and endpoint.state is not EndpointState.DELETING:
        unread = f"its spec cannot be read any more: {endpoint.unreadable}"
        return replace(endpoint, state=EndpointState.FAILED, reason=unread)
    if served is None or endpoint.name in served.unseen:
        return endpoint
    if endpoint.state is EndpointState.DELETING:
        if (endpoint.name, endpoint.created_at_s) not in served.gone:
            return endpoint
        return replace(endpoint, state=EndpointState.DELETED, ended_at_s=now_s, target_replicas=0, reason="deleted")
    load = observed.loads.get(endpoint.name)
    reason = "" if endpoint.is_given_up else endpoint.reason
    why = served.failures.get((endpoint.name, endpoint.created_at_s))
    if load is not None and load.ready > 0:
        reason = reason if why is None else UPDATE_FAILED + why  # Serve replaces none of these replicas any more
        return replace(endpoint, state=EndpointState.RUNNING, reason=reason)
    if load is not None and endpoint.target_replicas == 0:
        return replace(endpoint, state=EndpointState.RUNNING, reason=reason)  # the next request starts a replica
    if why is not None:
        if load is not None and load.install is not None and load.install.why in why:
            why = load.install.why  # Serve's message is a stack trace
        return replace(endpoint, state=EndpointState.FAILED, reason=why)
    if load is None and endpoint.state is EndpointState.RUNNING:
        return endpoint  # no report says that its replicas are gone
    return replace(endpoint, state=EndpointState.DEPLOYING, reason=reason)


def _is_wanted(endpoint: Endpoint) -> bool:
    is_over = endpoint.state is EndpointState.DELETED
    return not is_over and (not endpoint.unreadable or endpoint.state is EndpointState.DELETING)
