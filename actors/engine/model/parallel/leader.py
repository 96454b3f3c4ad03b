"""The leader of the member processes that compute one model. Only the leader has the requests, the schedule and the
cache's metadata. In each step it tells the other members what to compute.
"""

from __future__ import annotations

import math
import secrets
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

import torch

from raytide.actors.engine.kv_cache.kv_cache import KvCache
from raytide.actors.engine.model.decoder import PagedDecoder
from raytide.actors.engine.model.input_batch import StepInputs
from raytide.actors.engine.model.lora import Adapter, adapter_digest, read_adapter
from raytide.actors.engine.model.parallel.cache import LeaderCache
from raytide.actors.engine.model.parallel.collectives import Collectives, open_store
from raytide.actors.engine.model.parallel.decoder import Computation, ShardedDecoder
from raytide.actors.engine.model.parallel.launcher import Invitation, LocalMembers
from raytide.actors.engine.model.parallel.link import Ints, MemberLink, member_died, pack_step, watch
from raytide.actors.engine.model.parallel.shard import ModelShard
from raytide.actors.engine.model.parallel.sharded_weights import AdapterShard
from raytide.actors.models.content import content_digest
from raytide.core.errors import ConflictError, EngineDeadError, EngineError, from_json

Tensor = torch.Tensor

_COME_S = 180.0
"""The seconds within which all members must connect: they import torch first, on nodes that may be cold."""
_POLL_S = 0.2
_NOTICE_S = 1.0
"""The seconds for which a failed step waits for the watch thread to report which member has ended."""


class ThreadShare:
    """One of `parts` equal shares of torch's threads, with which this process computes until `close`. Open shares
    multiply (two halves leave a quarter), and may be closed in any order.
    """

    _open: ClassVar[list[ThreadShare]] = []
    _all: ClassVar[int] = 0
    """The number of threads while no share is open."""
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, parts: int) -> None:
        self.parts = parts
        with self._lock:
            if not self._open:
                ThreadShare._all = torch.get_num_threads()
            self._open.append(self)
            self._apply()

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self in self._open:
                self._open.remove(self)
                self._apply()

    def _apply(self) -> None:
        torch.set_num_threads(max(1, self._all // math.prod(each.parts for each in self._open)))


class GroupLeader:
    """Forms the group of member processes and gives them orders. If one member ends, the whole group ends.

    The layers are divided into `stages` pipeline stages, and the members are divided equally among the stages. The
    members of a stage share its heads.
    """

    def __init__(self, computation: Computation, size: int, launcher: LocalMembers, *, stages: int = 1) -> None:
        self._computation, self._launcher = computation, launcher
        self.death: EngineDeadError | None = None
        """The error that a call raises once the group has lost a member or is closed; None before."""
        self._has_ended = threading.Event()
        self._asking = threading.Lock()
        self._loads = self._adapter_loads = 0
        self._cache: LeaderCache
        listening = socket.create_server((launcher.host, 0), backlog=size)
        secret = secrets.token_hex(32)
        links: list[MemberLink] = []
        self._links = links
        self._finish = weakref.finalize(self, _end, links, launcher)
        self._thread_share = ThreadShare(launcher.local_size if computation.device.type == "cpu" else 1)
        try:
            with listening:
                launcher.launch(Invitation(launcher.host, listening.getsockname()[1], secret, size))
                links += _accept(listening, secret, size, launcher)
            self._order(
                prepare={
                    "device": computation.device.type,
                    "dtype": str(computation.dtype).removeprefix("torch."),
                    "max_len": computation.max_len,
                    "deterministic": computation.deterministic,
                    "quantized_input": computation.quantized.input,
                    "quantized_head": computation.quantized.rounds_head,
                    "rounds_kv": computation.quantized.rounds_kv,
                    "pipeline_parallel": stages,
                }
            )
            self._raise_refusal()
            store = open_store(launcher.host)
            self._order(join=[launcher.host, store.port])
            self._group = Collectives(
                store,
                ModelShard(0, size // stages, 0, stages),
                computation.device,
                own_host=launcher.host,
                ordered=computation.deterministic,
            )
            self._store = store
        except BaseException:
            self.close()
            raise
        this = weakref.ref(self)  # the thread must not keep the leader
        watch([link.fileno() for link in links], lambda index: _notice(this, links[index].rank))

    def load(self, model_dir: Path) -> LeaderDecoder:
        """Reads weights on all members. The present weights stay in use. Thread-safe. Raises the first error of any
        member; then no member keeps the weights.
        """
        with self._asking:
            self._loads += 1
            number = self._loads
            self._order(load={"number": number, "model_dir": str(model_dir), "digest": content_digest(model_dir)})
            failed: BaseException | None = None
            try:
                model = LeaderDecoder(self, number, self._computation, model_dir, self._group)
            except BaseException as error:
                failed = error
            try:
                self._raise_refusal(failed)
            except BaseException:
                self._order(drop_weights=number)
                raise
            return model

    def load_adapter(self, path: Path) -> Adapter:
        """Reads an adapter on all members. Call it between two steps. Raises the first error of any member. Raises
        ConflictError while weights are being loaded.
        """
        if not self._asking.acquire(blocking=False):
            raise ConflictError("weights are being loaded.", hint="Load the adapter when they are there.")
        try:
            self._adapter_loads += 1
            number, each = self._adapter_loads, self._computation
            self._order(adapter={"number": number, "path": str(path), "digest": adapter_digest(path)})
            failed: BaseException | None = None
            try:
                part = AdapterShard(each.arch, self._group)
                adapter = read_adapter(path, each.arch, each.ops, each.dtype, each.device, part, number)
            except BaseException as error:
                failed = error
            try:
                self._raise_refusal(failed)
            except BaseException:
                self._order(drop_adapter=number)
                raise
            return adapter
        finally:
            self._asking.release()

    def drop_adapter(self, adapter: Adapter) -> None:
        """Makes all members drop an adapter that no sequence uses any more."""
        self._order(drop_adapter=adapter.number)

    def use(self, model: PagedDecoder) -> None:
        """Makes all members compute with these weights from the next step on."""
        assert isinstance(model, LeaderDecoder)
        self._order(use=model.number)

    def new_cache(self, num_blocks: int, num_host_blocks: int, block_size: int) -> KvCache:
        self._order(cache=[num_blocks, num_host_blocks, block_size])
        self._cache = LeaderCache(self, self._group, self._computation.arch, num_blocks, num_host_blocks)
        return self._cache

    def free_weights(self) -> None:
        self._order(free_weights=True)

    def close(self) -> None:
        """Ends the other members, and gives their threads back to this process. Idempotent."""
        self._thread_share.close()
        if self.death is None:
            self.death = EngineDeadError("the engine has been closed.", hint="Make a new one.")
        self._finish()

    def order(self, **command: Any) -> None:
        """Sends a command to all members. The command is one keyword argument, such as `free=True`. Each member handles
        its commands in the order in which they were sent.
        """
        if self.death is not None:
            raise self.death
        self._order(**command)

    @contextmanager
    def step(self, packed: Ints) -> Iterator[None]:
        """Makes all other members compute a step. The caller computes its own part inside the context."""
        with self.together():
            for link in self._links:
                link.send_step(packed)
            yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context for work that all members do at the same time. If the leader's part fails, the group ends, because
        members may have stopped at different places.
        """
        if self.death is not None:
            raise self.death
        with _interrupt_deferred():
            try:
                yield
            except BaseException as error:
                raise self._failed(error) from error

    def holds(self, layers: list[Tensor]) -> bool:
        """Returns whether these tensors are the engine's KV cache."""
        return layers is self._cache.layers

    def notice_end(self, rank: int) -> None:
        if self.death is None:
            self.death = member_died(rank, "its connection closed")
        self._has_ended.set()

    def _order(self, **command: Any) -> None:
        with _interrupt_deferred():
            for link in self._links:
                try:
                    link.send(command)
                except OSError as error:
                    raise self._failed(error) from None

    def _raise_refusal(self, own: BaseException | None = None) -> None:
        """Waits for all members' answers to the last order. Raises the first error: `own`, which is the leader's, comes
        before those of the members.
        """
        with _interrupt_deferred():
            errors = [own, *[self._answer(link) for link in self._links]]
        for error in errors:
            if error is not None:
                raise error

    def _answer(self, link: MemberLink) -> BaseException | None:
        try:
            answer = link.receive()
        except OSError as error:
            return self._failed(error)
        assert isinstance(answer, dict)
        return from_json(answer["error"]) if "error" in answer else None

    def _failed(self, error: BaseException) -> BaseException:
        """Ends the other members, and returns the error with which the group ends."""
        self._has_ended.wait(_NOTICE_S)
        if self.death is None:
            self.death = EngineDeadError(
                f"the members of this replica are out of step after {error!r}.",
                hint="Retry elsewhere; the replica is formed anew.",
            )
        self._finish()
        return self.death if isinstance(error, Exception) else error


class LeaderDecoder(ShardedDecoder):
    """The leader's part of the model. Each method call makes the other members compute their parts."""

    def __init__(
        self, leader: GroupLeader, number: int, computation: Computation, model_dir: Path, group: Collectives
    ) -> None:
        super().__init__(computation, model_dir, group)
        self._leader, self.number = leader, number

    @torch.inference_mode()
    def forward(self, step: StepInputs, cache: list[Tensor]) -> Tensor:
        with self._step(step, cache, wants_logits=True):
            return super().head(super().hidden(step, cache))

    @torch.inference_mode()
    def hidden(self, step: StepInputs, cache: list[Tensor]) -> Tensor:
        with self._step(step, cache, wants_logits=False):
            return super().hidden(step, cache)

    def head(self, hidden_RN: Tensor) -> Tensor:
        """Returns the logits of hidden states. For a model that generates, `hidden_RN` must be the first rows of the
        most recent result of `hidden`. For a model that classifies, `hidden_RN` may be any rows.
        """
        if not self.arch.num_labels:
            self._leader.order(head=len(hidden_RN))
        return super().head(hidden_RN)

    def discard(self) -> None:
        self._leader.order(drop_weights=self.number)

    def _step(self, step: StepInputs, cache: list[Tensor], *, wants_logits: bool) -> AbstractContextManager[None]:
        """A context in which all members compute the step. If `cache` is not the engine's, each member makes a cache of
        the same size for this pass.
        """
        own_blocks = 0 if self._leader.holds(cache) else cache[0].shape[1] // step.batch.block_size
        return self._leader.step(pack_step(step, own_blocks=own_blocks, wants_logits=wants_logits))


def _accept(listening: socket.socket, secret: str, size: int, launcher: LocalMembers) -> list[MemberLink]:
    """Returns the connections of the other members by rank. Raises EngineError when one does not connect in time."""
    links: dict[int, MemberLink] = {}
    known: SimpleQueue[MemberLink] = SimpleQueue()
    deadline_s = time.monotonic() + _COME_S
    listening.settimeout(_POLL_S)
    while len(links) < size - 1:
        missing = [rank for rank in range(1, size) if rank not in links]
        if not known.empty():
            link = known.get()
            if link.rank in missing:
                links[link.rank] = link
            else:
                link.close()
            continue
        why = launcher.problem()
        if why is None and time.monotonic() > deadline_s:
            why = f"members {missing} did not connect within {_COME_S:.0f} s"
        if why is not None:
            for link in links.values():
                link.close()
            raise EngineError(f"the group of {size} members was not formed: {why}.", hint="See the replica's log.")
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            continue
        handshake = threading.Thread(target=_authenticate, args=(connection, secret, known), daemon=True)
        handshake.start()
        handshake.join(_POLL_S)  # the others do not wait longer for one that is silent
    return [links[rank] for rank in sorted(links)]


def _authenticate(connection: socket.socket, secret: str, known: SimpleQueue[MemberLink]) -> None:
    """Adds the connection's link to `known`, or closes the connection if its other side is not a member."""
    try:
        known.put(MemberLink.accept(connection, secret))
    except (OSError, ValueError):  # a stranger: the members still have their time
        connection.close()


@contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Delays Ctrl-C until the end of the block, so that the members have done the same as the leader. It has an effect
    only in the main thread, where Python raises it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if held:
            signal.raise_signal(signal.SIGINT)


def _notice(leader: weakref.ref[GroupLeader], rank: int) -> None:
    found = leader()
    if found is not None:
        found.notice_end(rank)


def _end(links: list[MemberLink], launcher: LocalMembers) -> None:
    for link in links:
        link.close()
    launcher.stop()
