"""The replicas of one endpoint, with a connection to each replica."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from raytide.actors.engine.backends.remote.client import RemoteEngine
from raytide.actors.engine.backends.remote.wire import STATUS_PERIOD_S
from raytide.actors.engine.types import EngineInfo, EngineStats, GenChunk, GenRequest
from raytide.actors.serving.ray_serve.keys import ReplicaAddress
from raytide.core.errors import EngineDeadError, NotFoundError, OverloadedError, WaitTimeoutError
from raytide.core.logs import logger
from raytide.gateway.replicas.routing.router import ReplicaState, Router

log = logger(__name__)
T = TypeVar("T")

_STALE_S = 1.0
"""The age in seconds of a replica's last status above which it gets no requests while others answer, because it may
hang.
"""
_ADAPTER_S = 30.0
"""The seconds for which a request waits for its adapter while replicas without that adapter are ready."""
_MOST_WAITING = 1024
_CONNECT_S = 5.0
"""The longest wait in seconds for the connections to all replicas, and for their answers to a question."""
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 2.0


class Replica:
    """One connected replica, with its last reported status."""

    def __init__(self, name: str, engine: RemoteEngine, info: EngineInfo) -> None:
        self.name, self.engine, self.info = name, engine, info
        self.in_flight = 0
        """The number of requests that this gateway has sent and that have not ended."""
        self._died_s = -math.inf

    @property
    def load(self) -> float:
        """The number of requests on the replica. Requests of this gateway are counted exactly. Requests of other
        gateways are counted as of the replica's last status.
        """
        status = self.engine.status
        held = status.stats.running + status.stats.waiting if status.stats is not None else 0
        return float(max(held, self.in_flight))

    @property
    def takes_requests(self) -> bool:
        if not self.engine.is_connected:
            return False
        status = self.engine.status
        heard_since_s = status.at_s - STATUS_PERIOD_S  # the first one after a death may have been written before it
        return status.problem is None and not status.is_draining and heard_since_s > self._died_s

    def has_new_weights(self) -> bool:
        """Returns True if the replica's last status reports another version of the weights than `info` contains. In
        that case the call also updates `info`.
        """
        stats = self.engine.status.stats
        if stats is None or stats.weights_version in ("", self.info.weights_version):
            return False
        self.info = replace(self.info, weights_version=stats.weights_version)
        return True

    def has_adapter(self, lora: str | None) -> bool:
        """Returns whether the replica has loaded the LoRA adapter, according to its last status."""
        stats = self.engine.status.stats
        return lora is None or (stats is not None and lora in stats.adapters)

    def version(self, lora: str | None) -> str:
        """Returns a text that changes with the weights and with the adapter's files."""
        stats = self.engine.status.stats
        adapter = "" if lora is None or stats is None else stats.adapters.get(lora, "")
        return f"{self.info.weights_version}+{adapter}" if adapter else self.info.weights_version

    async def ask(self, question: Callable[[RemoteEngine], Awaitable[T]]) -> T:
        with self._noticing_death():
            return await question(self.engine)

    def routing_state(self) -> ReplicaState:
        stats, info = self.engine.status.stats or EngineStats(), self.info
        return ReplicaState(
            self.name,
            running=stats.running,
            waiting=stats.waiting,
            free_kv_tokens=stats.free_blocks * info.block_size if stats.num_blocks else math.inf,
            cache_tokens=info.num_blocks * info.block_size if "prefix_cache" in info.features else 0,
            block_tokens=info.block_size,
        )

    async def generate(
        self,
        request: GenRequest,
        waited_s: float,
        prefix: bytes,
        prefill_at: Sequence[object] | None = None,
        *,
        new_tokens: int = 0,
    ) -> AsyncIterator[GenChunk]:
        self.in_flight += 1
        try:
            stream = self.engine.generate(
                request, waited_s=waited_s, prefix=prefix, prefill_at=prefill_at, new_tokens=new_tokens
            )
            async with aclosing(stream):  # type: ignore[type-var]
                with self._noticing_death():
                    async for chunk in stream:
                        if chunk.finish_reason == "abort":  # its engine has died, or its drain is over
                            raise EngineDeadError(f"replica {self.name} ended the request.", hint="Retry.")
                        yield chunk
        finally:
            self.in_flight -= 1

    @contextmanager
    def _noticing_death(self) -> Iterator[None]:
        """Stops sending requests to the replica if its engine dies in this context, until a later status shows that it
        works again.
        """
        try:
            yield
        except EngineDeadError:
            self._died_s = time.monotonic()
            raise


class ReplicaSet:
    """Keeps a connection to each replica of an endpoint. Use it from one event loop."""

    def __init__(self, endpoint: str, on_info: Callable[[EngineInfo], None] = lambda info: None) -> None:
        self.endpoint = endpoint
        self.router = Router()
        self.waiting = 0
        """The number of requests that wait for a replica."""
        self.most_waiting = _MOST_WAITING
        self._on_info = on_info
        self._addresses: dict[str, ReplicaAddress] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._replicas: dict[str, Replica] = {}
        self._is_retired = False
        self.token_texts: dict[int, bytes] = {}
        self._changed = asyncio.Event()

    def update(self, addresses: Mapping[str, ReplicaAddress]) -> None:
        """Connects to new replicas. Gives up replicas that have no address in `addresses`.

        An open connection to such a replica stays open until the replica closes it, so that its requests can finish.
        """
        for name in self._addresses.keys() - addresses.keys():
            # an open connection is kept: a draining replica deletes its address first and finishes its requests
            if name not in self._replicas:
                self._keepers.pop(name).cancel()
        self._addresses = dict(addresses)
        for name in addresses:
            if name not in self._keepers or self._keepers[name].done():
                self._keepers[name] = asyncio.create_task(self._keep(name))

    def retire(self) -> None:
        """Marks the endpoint as deleted. Running requests may finish on their replicas. Requests that wait for a
        replica are refused.
        """
        self._is_retired = True
        self.update({})
        self._changed.set()

    @property
    def connected(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.engine.is_connected]

    @property
    def ready(self) -> list[Replica]:
        """The replicas that take requests.

        Includes only replicas with a recent status. If there are none, includes the replicas with an old status.
        """
        listed = self._addresses
        ready = [replica for name, replica in self._replicas.items() if name in listed and replica.takes_requests]
        since_s = time.monotonic() - _STALE_S
        return [replica for replica in ready if replica.engine.status.at_s >= since_s] or ready

    async def holder(self, rejoin_key: str) -> Replica | None:
        """Returns the replica that computes or stores the answer to the request with the key `rejoin_key`. Returns None
        if no replica does.

        If replicas are not connected yet, the call first waits up to five seconds for the connections.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_CONNECT_S):
                while self._addresses.keys() - self._replicas.keys():
                    self._changed.clear()
                    await self._changed.wait()
        asked = self.connected
        answers = [asyncio.ensure_future(replica.engine.holds(rejoin_key)) for replica in asked]
        if answers:
            await asyncio.wait(answers, timeout=_CONNECT_S)
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        held = [each.done() and not each.cancelled() and each.exception() is None and each.result() for each in answers]
        return next((replica for replica, is_held in zip(asked, held, strict=True) if is_held), None)

    def address(self, replica: str) -> ReplicaAddress | None:
        return self._addresses.get(replica)

    async def wait_ready(self, timeout_s: float, lora: str | None = None, *, has_begun: bool = False) -> list[Replica]:
        """Returns the replicas that take requests and have loaded the adapter. Waits until there is at least one.

        Raises WaitTimeoutError after the timeout. The timeout is shorter if replicas are ready but lack the adapter.
        Raises OverloadedError if too many requests wait, unless the answer `has_begun`: a client has a part of it.
        Raises NotFoundError if the endpoint was deleted.
        """
        if ready := [replica for replica in self.ready if replica.has_adapter(lora)]:
            return ready
        if self.ready:
            timeout_s = min(timeout_s, _ADAPTER_S)
        if self.waiting >= self.most_waiting and not has_begun:
            text = f"{self.waiting} requests wait for a replica of {self.endpoint}."
            raise OverloadedError(text, hint="Retry later.")
        deadline_s = time.monotonic() + timeout_s
        self.waiting += 1
        try:
            while not (ready := [replica for replica in self.ready if replica.has_adapter(lora)]):
                if self._is_retired:
                    raise NotFoundError(
                        f"endpoint {self.endpoint} was deleted.", hint="`raytide status` lists endpoints."
                    )
                self._changed.clear()
                async with asyncio.timeout(deadline_s - time.monotonic()):
                    await self._changed.wait()
            return ready
        except TimeoutError:
            raise WaitTimeoutError(
                f"no replica of {self.endpoint} was ready{_with(lora)} within {timeout_s:g} s.",
                hint="It may be starting, or wait for a node: `raytide serve` shows its state.",
            ) from None
        finally:
            self.waiting -= 1

    def _on_status(self, name: str) -> None:
        """Passes a status on to the router. If the replica's weights have changed, it also drops the replica's prefix
        index, because the engine has then dropped its prefix cache.
        """
        self._changed.set()
        replica = self._replicas.get(name)
        if replica is None:
            return
        self.router.add_report(name, replica.engine.status.pending_tokens)
        if replica.has_new_weights():
            self.router.forget(name)
            self._on_info(replica.info)

    async def close(self) -> None:
        for keeper in self._keepers.values():
            keeper.cancel()
        for replica in self._replicas.values():
            await replica.engine.shutdown()

    async def _keep(self, name: str) -> None:
        """Keeps a connection to a replica while the replica has an address, which may change."""
        pause_s = _FIRST_RETRY_S
        while (address := self._addresses.get(name)) is not None:
            lost = asyncio.Event()
            engine = RemoteEngine(
                address.host,
                address.port,
                address.secret,
                name=name,
                token_texts=self.token_texts,
                on_status=partial(self._on_status, name),
                on_prefix=partial(self.router.add_prefix, name),
                on_lost=lost.set,
            )
            try:
                info = await engine.start()
            except EngineDeadError:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LAST_RETRY_S)
                continue
            pause_s = _FIRST_RETRY_S
            self._replicas[name] = Replica(name, engine, info)
            self._on_info(info)
            self._changed.set()
            try:
                await lost.wait()
                log.info("a replica's connection is lost", extra={"endpoint": self.endpoint, "replica": name})
            finally:
                self._replicas.pop(name, None)
                self.router.forget(name)
                with suppress(EngineDeadError):
                    await engine.shutdown()
        self._keepers.pop(name, None)


def _with(lora: str | None) -> str:
    return "" if lora is None else f" with adapter {lora}"
