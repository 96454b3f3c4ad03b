"""Keep Ray Serve at what the endpoints' records say, in a thread of its own: a deployment takes seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from raytide.actors.serving.ray_serve.control import ServeControl
from raytide.control.reconcile.observation import ClusterObservation
from raytide.core.logs import logger
from raytide.core.objects.endpoint import Endpoint, EndpointState

log = logger(__name__)

_NODE_DIED = "its node has died"
"""Ray's words. Serve counts a replica that dies with its node while it starts against the model."""


@dataclass(frozen=True, slots=True)
class ServeObservation:
    """What the last pass saw."""

    gone: frozenset[tuple[str, float]] = frozenset()
    """Deleted endpoints that Serve has no more, by name and time of creation: a later one of that name is another."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """What Serve gave up, and why."""
    unseen: Mapping[str, str] = field(default_factory=dict)
    """Endpoints of which nothing can be said, and what went wrong."""

    @property
    def errors(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.unseen.values()))


class ServeSync:
    """One pass at a time; a pass that is still running when the next is due is left to finish."""

    def __init__(self, control: ServeControl) -> None:
        self._control = control
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="serving")
        self._pass: Future[ServeObservation] | None = None
        self._published: dict[str, int] = {}
        self.served: ServeObservation | None = None
        """None until a pass was made."""

    def sync(self, endpoints: Iterable[Endpoint]) -> None:
        """Begin a pass unless one runs; take over what the last one saw."""
        if self._pass is not None:
            if not self._pass.done():
                return
            self.served = self._pass.result()
            self._pass = None
        wanted = tuple(endpoints)
        if wanted:
            self._pass = self._pool.submit(self._do, wanted)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _do(self, endpoints: tuple[Endpoint, ...]) -> ServeObservation:
        """All endpoints after one look at Serve: what they did not have then is for the next pass to see."""
        gone: set[tuple[str, float]] = set()
        failures: dict[str, str] = {}
        unseen: dict[str, str] = {}
        try:
            there = self._control.applications()
            if not there:  # each start of a Serve that runs is a line in its log
                self._control.start()
        except Exception as error:  # Serve may fail in any way; the next pass tries again
            log.warning("serving pass failed", extra={"error": str(error)})
            return ServeObservation(unseen={endpoint.name: f"Ray Serve: {error}" for endpoint in endpoints})
        for endpoint in endpoints:
            seen = there.get(endpoint.name)
            try:
                if endpoint.state is EndpointState.DELETING:
                    self._control.delete(endpoint.name, is_there=seen is not None)
                    self._published.pop(endpoint.name, None)
                    if seen is None:
                        gone.add((endpoint.name, endpoint.created_at_s))
                elif not self._match_one(endpoint, is_there=seen is not None) and seen is not None:
                    if _NODE_DIED in seen.failure:
                        self._control.delete(
                            endpoint.name, is_there=True
                        )  # the next pass deploys it anew, with a fresh count
                    elif seen.failure:
                        failures[endpoint.name] = seen.failure
            except Exception as error:  # as above; the other endpoints have nothing to do with it
                log.warning("endpoint failed", extra={"endpoint": endpoint.name, "error": str(error)})
                unseen[endpoint.name] = f"endpoint {endpoint.name}: {error}"
        return ServeObservation(frozenset(gone), failures, unseen)

    def _match_one(self, endpoint: Endpoint, *, is_there: bool) -> bool:
        """Whether it was deployed just now: then what was seen before says nothing about it."""
        is_new = self._control.deploy(endpoint, is_there=is_there)
        if self._published.get(endpoint.name) != endpoint.target_replicas:
            self._control.publish(endpoint.name, endpoint.target_replicas)
            self._published[endpoint.name] = endpoint.target_replicas
        return is_new


def follow(endpoint: Endpoint, world: ClusterObservation, served: ServeObservation | None, now_s: float) -> Endpoint:
    """The endpoint's state as Serve shows it. Pure."""
    if endpoint.unreadable and endpoint.state is not EndpointState.DELETING:
        unread = f"its spec cannot be read any more: {endpoint.unreadable}"
        return replace(endpoint, state=EndpointState.FAILED, reason=unread)
    if served is None or endpoint.name in served.unseen:
        return endpoint
    if endpoint.state is EndpointState.DELETING:
        if (endpoint.name, endpoint.created_at_s) not in served.gone:
            return endpoint
        return replace(endpoint, state=EndpointState.DELETED, ended_at_s=now_s, target_replicas=0, reason="deleted")
    load = world.loads.get(endpoint.name)
    reason = "" if endpoint.state is EndpointState.FAILED else endpoint.reason
    if load is not None and load.ready > 0:
        return replace(endpoint, state=EndpointState.RUNNING, reason=reason)
    if why := served.failures.get(endpoint.name):
        return replace(endpoint, state=EndpointState.FAILED, reason=why)
    if load is None and endpoint.state is EndpointState.RUNNING:
        return endpoint  # nobody said that its replicas are gone
    return replace(endpoint, state=EndpointState.DEPLOYING, reason=reason)
