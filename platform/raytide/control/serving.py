"""Keep Ray Serve at what the endpoints' records say, in a thread of its own: a deployment takes seconds."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from raytide.actors.serving.control import ServeControl
from raytide.control.world import World
from raytide.core.endpoint import Endpoint, EndpointState
from raytide.core.logs import logger

log = logger(__name__)

_NODE_DIED = "its node has died"
"""Ray's words. Serve counts a replica that dies with its node while it starts against the model."""


@dataclass(frozen=True, slots=True)
class Served:
    """What the last pass saw."""

    names: frozenset[str] = frozenset()
    failures: tuple[tuple[str, str], ...] = ()
    error: str = ""


class Serving:
    """One pass at a time; a pass that is still running when the next is due is left to finish."""

    def __init__(self, control: ServeControl) -> None:
        self._control = control
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="serving")
        self._pass: Future[Served] | None = None
        self._published: dict[str, int] = {}
        self.served: Served | None = None
        """None until a pass was made."""

    def match(self, endpoints: Iterable[Endpoint]) -> None:
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

    def _do(self, endpoints: tuple[Endpoint, ...]) -> Served:
        try:
            if not self._control.names():  # each start of a Serve that runs is a line in its log
                self._control.start()
            failures = []
            for endpoint in endpoints:
                self._match_one(endpoint)
                if endpoint.state is EndpointState.DELETING or not (why := self._control.failure(endpoint.name)):
                    continue
                if _NODE_DIED in why:
                    self._control.delete(endpoint.name)  # the next pass deploys it anew, with a fresh count
                else:
                    failures.append((endpoint.name, why))
            return Served(self._control.names(), tuple(failures))
        except Exception as error:  # Serve may fail in any way; the next pass tries again
            log.warning("serving pass failed", extra={"error": str(error)})
            return Served(self.served.names if self.served else frozenset(), error=str(error))

    def _match_one(self, endpoint: Endpoint) -> None:
        if endpoint.state is EndpointState.DELETING:
            self._control.delete(endpoint.name)
            self._published.pop(endpoint.name, None)
            return
        self._control.deploy(endpoint)
        if self._published.get(endpoint.name) != endpoint.target_replicas:
            self._control.publish(endpoint.name, endpoint.target_replicas)
            self._published[endpoint.name] = endpoint.target_replicas


def follow(endpoint: Endpoint, world: World, served: Served | None, now_s: float) -> Endpoint:
    """The endpoint's state as Serve shows it. Pure."""
    if served is None or served.error:
        return endpoint
    if endpoint.state is EndpointState.DELETING:
        if endpoint.name in served.names:
            return endpoint
        return replace(endpoint, state=EndpointState.DELETED, ended_at_s=now_s, target_replicas=0, reason="deleted")
    load = world.loads.get(endpoint.name)
    if load is not None and load.ready > 0:
        return replace(endpoint, state=EndpointState.RUNNING)
    why = dict(served.failures).get(endpoint.name)
    if why:
        return replace(endpoint, state=EndpointState.FAILED, reason=why)
    return replace(endpoint, state=EndpointState.DEPLOYING)
