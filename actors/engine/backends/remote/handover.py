"""Prefill in one engine process and decode in another. The decoding process asks the prefilling process for the
prompt's KV and continues from there.

The KV goes directly from process to process. The gateway only names the process to ask. If the handover fails (a lost
process, other weights, lack of memory), the decoding process computes the prompt itself. A failure therefore costs only
time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from raytide.actors.engine.backends.remote.client import RemoteEngine
from raytide.actors.engine.backends.remote.direct_output import DirectOutput
from raytide.actors.engine.backends.remote.fair_admission import FairAdmission
from raytide.actors.engine.base import Engine, StreamProgress, aborted_chunks
from raytide.actors.engine.kv_cache.handle import KvHandle
from raytide.actors.engine.types import GenChunk, GenRequest
from raytide.core.errors import RaytideError

_log = logging.getLogger(__name__)

_MOST_AT_ONCE = 8
"""The most requests whose KV is in transit at once, so that its memory is bounded."""
_RETRY_S = 15.0
"""The seconds for which a peer is not tried again after a connection to it has failed."""


@dataclass(frozen=True, slots=True)
class PrefillPeer:
    """The address of an engine process that computes prompts for this one."""

    host: str
    port: int
    secret: str
    name: str


async def prefill(
    engine: Engine, admission: FairAdmission, request: GenRequest
) -> tuple[list[GenChunk], KvHandle | None]:
    """Computes a request up to its first token and takes the request out of the engine. Returns the chunks so far and
    the KV. If the request ends in this engine, the KV is None.
    """
    chunks: list[GenChunk] = []
    handle = None
    async with aclosing(admission.generate(request)) as stream:
        async for chunk in stream:
            if handle is not None and chunk.finish_reason == "abort":  # the mark of the export
                return chunks, handle
            chunks.append(chunk)
            if len(chunks) == 1 and chunk.usage is None:
                handle = await _exported(engine, request.request_id)
    return chunks, None


async def _exported(engine: Engine, request_id: str) -> KvHandle | None:
    try:
        return await engine.export_kv(request_id)
    except RaytideError as error:  # it has ended meanwhile, or gave way to another team: then it is finished here
        _log.info("request %s is not handed over: %s", request_id, error)
        return None


class HandoverEngine:
    """Continues requests whose prompts were computed by other engine processes (peers). Passes all other requests to
    its own engine unchanged.
    """

    def __init__(self, engine: Engine, direct: DirectOutput) -> None:
        self._engine, self._direct = engine, direct
        self._assigned: dict[str, PrefillPeer] = {}
        self._asking: dict[str, asyncio.Task[tuple[list[GenChunk], KvHandle | None]]] = {}
        self._peers: dict[PrefillPeer, RemoteEngine] = {}
        self._starts: dict[PrefillPeer, asyncio.Task[RemoteEngine]] = {}
        """The connections that are being made or have failed lately. All requests for a peer wait for the same one."""
        self._slots = asyncio.Semaphore(_MOST_AT_ONCE)

    def assign(self, request_id: str, peer: PrefillPeer) -> None:
        """Assigns a request to a peer. Once the request is passed to `generate`, the peer computes the KV of the
        prompt.
        """
        self._assigned[request_id] = peer

    def forget(self, request_id: str) -> None:
        """Removes the peer that was assigned to a request, unless `generate` has used the assignment already."""
        self._assigned.pop(request_id, None)

    def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:
        peer = self._assigned.pop(request.request_id, None)
        return self._engine.generate(request) if peer is None else self._continued(request, peer)

    async def abort(self, request_id: str) -> bool:
        if request_id in self._asking:
            return self._asking[request_id].cancel()
        return await self._engine.abort(request_id)

    async def close(self) -> None:
        for start in self._starts.values():
            start.cancel()
        for engine in self._peers.values():
            await engine.shutdown()

    async def _continued(self, request: GenRequest, peer: PrefillPeer) -> AsyncGenerator[GenChunk]:
        request_id, progress = request.request_id, StreamProgress(request)
        asking = self._asking[request_id] = asyncio.create_task(self._ask(peer, request))
        try:
            await asyncio.wait({asking})
        finally:
            del self._asking[request_id]
            asking.cancel()
        if asking.cancelled():
            for chunk in aborted_chunks(request, len(request.prompt)):
                self._direct.give(request_id)
                yield chunk
            return
        chunks, handle = asking.result()
        for chunk in chunks:
            progress.add(chunk)
            self._direct.give(request_id)
            yield chunk
        if chunks and chunks[-1].usage is not None:
            return
        if handle is not None:
            is_begun = False
            try:
                async with aclosing(self._engine.import_kv(handle, request)) as rest:  # type: ignore[type-var]
                    async for chunk in rest:
                        is_begun = True
                        yield chunk
                return
            except RaytideError as error:
                if is_begun:
                    raise
                _log.warning("the KV of peer %s is of no use: %s", peer.name, error)
        async with aclosing(self._engine.generate(progress.resumed())) as rest:  # type: ignore[type-var]
            async for chunk in rest:
                yield chunk

    async def _ask(self, peer: PrefillPeer, request: GenRequest) -> tuple[list[GenChunk], KvHandle | None]:
        """Returns the first chunks of a request and its KV; no chunks and None if the peer has failed."""
        try:
            engine = await self._connected(peer)  # takes no slot of requests for other peers
            async with self._slots:
                chunks, packed = await engine.prefill(request)
                handle = await asyncio.to_thread(KvHandle.from_bytes, packed) if packed else None
                return chunks, handle
        except RaytideError as error:
            _log.warning("peer %s computes no prompt: %s", peer.name, error)
            return [], None

    async def _connected(self, peer: PrefillPeer) -> RemoteEngine:
        for known, engine in list(self._peers.items()):
            if not engine.is_connected:
                del self._peers[known]
        if peer in self._peers:
            return self._peers[peer]
        if peer not in self._starts:
            self._starts[peer] = asyncio.create_task(self._start(peer))
        return await asyncio.shield(self._starts[peer])

    async def _start(self, peer: PrefillPeer) -> RemoteEngine:
        engine = RemoteEngine(peer.host, peer.port, peer.secret, name=peer.name)
        try:
            await engine.start()
        except BaseException:
            asyncio.get_running_loop().call_later(_RETRY_S, self._starts.pop, peer, None)
            raise
        del self._starts[peer]
        self._peers[peer] = engine
        return engine
