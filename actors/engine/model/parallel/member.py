"""The process of a group member other than the leader: `python -m raytide.actors.engine.model.parallel.member`.

It reads its invitation as a line of JSON from stdin and executes the leader's orders. It ends when the leader has gone,
or when the process that started it has gone.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from raytide.actors.engine.model.lora import Adapter, LoraRows, adapter_digest, read_adapter
from raytide.actors.engine.model.parallel.cache import MemberCache
from raytide.actors.engine.model.parallel.collectives import Collectives, connect_store
from raytide.actors.engine.model.parallel.decoder import Computation, ShardedDecoder
from raytide.actors.engine.model.parallel.link import MemberLink, StepArrays, watch
from raytide.actors.engine.model.parallel.shard import ModelShard
from raytide.actors.engine.model.parallel.sharded_weights import AdapterShard
from raytide.actors.engine.model.weight_loader import QuantizedOptions
from raytide.actors.engine.sequence import StepPlan
from raytide.actors.models.architecture import Architecture
from raytide.actors.models.content import content_digest
from raytide.actors.models.families import read_architecture
from raytide.core.errors import ConflictError, EngineError, RaytideError
from raytide.core.logs import log_to
from raytide.kernels.device import resolve_device
from raytide.kernels.registry import ops_for

_log = logging.getLogger(__name__)


class GroupMember:
    """Holds this member's weights and KV, and executes the leader's orders."""

    def __init__(self, link: MemberLink, invitation: dict[str, Any]) -> None:
        self._link, self._invitation = link, invitation
        self._models: dict[int, ShardedDecoder] = {}
        self._adapters: dict[int, Adapter] = {}
        self._used = 0
        self._arch: Architecture
        self._group: Collectives
        self._cache: MemberCache
        self._hidden_RN: torch.Tensor

    def follow(self) -> None:
        """Executes orders until the leader has gone."""
        while True:
            try:
                message = self._link.receive()
            except OSError:
                return
            if isinstance(message, dict):
                ((name, value),) = message.items()
                getattr(self, f"_order_{name}")(value)
            else:
                self._compute(StepArrays(message, self._device))

    def _order_prepare(self, terms: dict[str, Any]) -> None:
        """Builds the operators before the group forms and others wait for this member: that may take minutes on a new
        machine.
        """
        name = f"cuda:{self._invitation['local_rank']}" if terms["device"] == "cuda" else terms["device"]

        def prepare() -> None:
            device = resolve_device(name)
            self._device = device.torch_device
            self._dtype, self._max_len = device.dtype(terms["dtype"]), terms["max_len"]
            self._ops, self._ordered = ops_for(device.kind, terms["deterministic"]), terms["deterministic"]
            self._options = QuantizedOptions(terms["quantized_input"], terms["quantized_head"], terms["rounds_kv"])
            stages = terms["pipeline_parallel"]
            self._shard = ModelShard.of_group(stages, self._invitation["size"] // stages)[self._link.rank]

        self._answer("prepare", prepare)

    def _order_join(self, address: list[Any]) -> None:
        self._group = Collectives(
            connect_store(*address),
            self._shard,
            self._device,
            own_host=self._invitation["own_host"],
            ordered=self._ordered,
        )

    def _order_load(self, order: dict[str, Any]) -> None:
        """Loads weights in a thread, while steps go on."""
        number, digest = order["number"], order["digest"]
        # The first is the replica's own, of which this machine may have a copy elsewhere.
        own = self._invitation["model_dir"] if number == 1 else ""
        path = Path(own or order["model_dir"])

        def load() -> None:
            if content_digest(path) != digest:
                raise ConflictError(
                    f"{path} holds other weights for member {self._link.rank} than for the leader.",
                    hint="Give every node the same files.",
                )
            arch = self._arch = read_architecture(path, serves=True)
            computation = Computation(
                arch, self._ops, self._device, self._dtype, self._max_len, self._ordered, self._options
            )
            self._models[number] = ShardedDecoder(computation, path, self._group)

        threading.Thread(target=self._answer, args=(f"load {path}", load)).start()

    def _order_adapter(self, order: dict[str, Any]) -> None:
        path = Path(order["path"])

        def load() -> None:
            if adapter_digest(path) != order["digest"]:
                raise ConflictError(
                    f"{path} holds another adapter for member {self._link.rank} than for the leader.",
                    hint="Give every node the same files.",
                )
            part = AdapterShard(self._arch, self._group)
            adapter = read_adapter(path, self._arch, self._ops, self._dtype, self._device, part, order["number"])
            self._adapters[adapter.number] = adapter

        self._answer(f"load adapter {path}", load)

    def _order_drop_adapter(self, number: int) -> None:
        self._adapters.pop(number, None)

    def _answer(self, what: str, work: Callable[[], None]) -> None:
        """Runs `work`, for which the leader waits, and tells the leader that it is done or the error that it raised."""
        try:
            work()
        except RaytideError as error:
            self._link.send({"error": error.to_json()})
        except Exception as error:
            _log.exception("member %d cannot %s", self._link.rank, what)
            failed = EngineError(f"member {self._link.rank} cannot {what}: {error!r}.", hint="See its log.")
            self._link.send({"error": failed.to_json()})
        else:
            self._link.send({"done": what})

    def _order_use(self, number: int) -> None:
        for each in list(self._models):
            if each <= self._used and each != number:  # what was loaded later may still have its turn
                del self._models[each]
        self._used = number

    def _order_drop_weights(self, number: int) -> None:
        self._models.pop(number, None)

    def _order_free_weights(self, _: bool) -> None:
        self._models.pop(self._used, None)  # others are being loaded

    def _order_cache(self, sizes: list[int]) -> None:
        num_blocks, num_host_blocks, self._block_size = sizes
        self._cache = MemberCache(self._group, num_blocks, num_host_blocks)

    def _order_allocate(self, _: bool) -> None:
        self._cache.allocate(self._models[self._used].new_cache(self._cache.num_blocks, self._block_size))

    def _order_free(self, _: bool) -> None:
        self._cache.free()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _order_move(self, pairs: list[list[tuple[int, int]]]) -> None:
        swap_out, swap_in, copies = pairs
        self._cache.move(StepPlan(swap_out=swap_out, swap_in=swap_in, copies=copies))

    def _order_zero(self, blocks: list[int]) -> None:
        self._cache.zero_blocks(blocks)

    def _order_read(self, blocks: list[int]) -> None:
        self._cache.send_blocks(blocks, [])

    def _order_write(self, blocks: list[int]) -> None:
        self._cache.receive_blocks(blocks, [])

    def _order_head(self, count: int) -> None:
        if self._shard.stage == 0:
            self._models[self._used].head(self._hidden_RN[:count])

    def _compute(self, step: StepArrays) -> None:
        model, inputs = self._models[self._used], step.inputs
        own = step.own_blocks
        cache = model.new_cache(own, inputs.batch.block_size) if own else self._cache.layers
        spans = [(self._adapters[number], first, end) for number, first, end in step.adapters]
        inputs.loras = LoraRows(spans) if spans else None
        hidden_RN = model.hidden(inputs, cache)
        if self._shard.stage:
            return
        if step.wants_logits:
            model.head(hidden_RN)
        else:
            self._hidden_RN = hidden_RN


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the leader decides
    log_to()
    invitation = json.loads(sys.stdin.readline())
    rank = invitation["rank"]
    try:
        link = MemberLink.connect(invitation["host"], invitation["port"], invitation["secret"], rank)
    except (OSError, ValueError) as error:
        _log.error("member %d cannot reach its leader: %s", rank, error)
        sys.exit(1)
    # At once, whatever this process computes: a member without its group is of no use.
    watch([link.fileno(), sys.stdin.fileno()], lambda _: os._exit(0))
    try:
        GroupMember(link, invitation).follow()
    except BaseException:
        _log.critical("member %d ends", rank, exc_info=True)
        os._exit(1)
    os._exit(0)  # a load that goes on would keep the process


if __name__ == "__main__":
    main()
