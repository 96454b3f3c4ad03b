"""Applies the spec's live fields: the adapters and the weights. When one of these fields changes, the running replicas
apply the change without a restart.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from raytide.actors.engine.base import Engine
from raytide.actors.models.model_cache import StagedModel, staged_model
from raytide.actors.serving.ray_serve.keys import KV_NAMESPACE, live_prefix, replica_prefix, spec_key
from raytide.core import ray_internals
from raytide.core.errors import ConflictError, EngineDeadError, RaytideError
from raytide.core.logs import logger
from raytide.core.objects.endpoint import adapter_id
from raytide.core.objects.endpoint_load import LOADING

log = logger(__name__)

_PERIOD_S = 1.0
"""The seconds between two readings of the spec in the GCS."""
_GCS_TIMEOUT_S = 10.0
RETRY_S = 30.0
"""The time after which a load or a swap that failed is tried again."""
UNLOAD_AFTER_S = 3.0
"""The time after which an adapter that left the spec is unloaded: by then, gateways no longer send requests for it."""


class AdapterSync:
    """Loads and unloads the LoRA adapters of one engine. A failed load changes neither the base model nor other
    adapters.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        stage: Callable[[str], StagedModel] = staged_model,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._stage, self._now_s = engine, stage, now_s
        self._loaded: dict[str, StagedModel] = {}
        self._unwanted_s: dict[str, float] = {}
        self._failed: dict[str, tuple[float, str]] = {}
        self._wanted: dict[str, str] = {}

    def states(self) -> dict[str, str]:
        """Returns the state of each wanted adapter by name. The state of a loaded adapter is empty. The state of any
        other adapter is `loading`, or the error with which its load failed.
        """
        return {name: self._state(adapter_id(name, at)) for name, at in sorted(self._wanted.items())}

    async def sync(self, wanted: Mapping[str, str]) -> None:
        """Loads the wanted adapters that are not loaded yet. A failed load is tried again after RETRY_S. Unloads the
        adapters that are no longer wanted, once no request uses them. `wanted` maps adapter names to locations.
        """
        self._wanted = dict(wanted)
        ids = {adapter_id(name, location): location for name, location in wanted.items()}
        for adapter, location in ids.items():
            self._unwanted_s.pop(adapter, None)
            failed_s, _ = self._failed.get(adapter, (-RETRY_S, ""))
            if adapter not in self._loaded and self._now_s() - failed_s >= RETRY_S:
                await self._load(adapter, location)
        for adapter in self._loaded.keys() - ids.keys():
            if self._now_s() - self._unwanted_s.setdefault(adapter, self._now_s()) >= UNLOAD_AFTER_S:
                await self._unload(adapter)
        self._failed = {adapter: failure for adapter, failure in self._failed.items() if adapter in ids}

    def _state(self, adapter: str) -> str:
        if adapter in self._loaded:
            return ""
        return self._failed[adapter][1] if adapter in self._failed else LOADING

    async def _load(self, adapter: str, location: str) -> None:
        staged = StagedModel("")
        try:
            staged = await asyncio.to_thread(self._stage, location)
            await self._engine.load_lora(adapter, staged.path)
        except RaytideError as error:
            staged.close()
            if isinstance(error, EngineDeadError):
                raise
            self._failed[adapter] = self._now_s(), str(error)
            return
        self._failed.pop(adapter, None)
        self._loaded[adapter] = staged

    async def _unload(self, adapter: str) -> None:
        try:
            await self._engine.unload_lora(adapter)
        except ConflictError:  # a request uses it: the next round tries again
            return
        self._loaded.pop(adapter).close()
        self._unwanted_s.pop(adapter, None)
        self._failed.clear()  # there is room now for one that found none


def is_its_turn(replica: str, wanted: str, serving: Mapping[str, str], replicas: Collection[str]) -> bool:
    """Returns whether a replica may swap its weights now. It may if all `replicas` with smaller ids serve the wanted
    weights.

    By this rule replicas swap one after the other, and after a failure no further replica swaps. `serving` maps
    replica ids to the locations of the weights that the replicas serve. Replicas that have not reported yet are
    missing from it.
    """
    return all(serving.get(other) == wanted for other in replicas if other < replica)


class WeightsSync:
    """Swaps the weights of one engine. After a failed swap the engine keeps its weights."""

    def __init__(
        self,
        engine: Engine,
        model_dir: str,
        *,
        stage: Callable[[str], StagedModel] = staged_model,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`model_dir` is the local directory of the spec's model, with which the engine has started."""
        self._engine, self._model_dir, self._stage, self._now_s = engine, model_dir, stage, now_s
        self._staged = StagedModel(model_dir)
        self._failed_s = -RETRY_S
        self.location = ""
        """The location of the weights that the engine serves; "" for those of the spec's model."""
        self.asked = ""
        """The location of the weights that were wanted last."""
        self.error = ""
        """The error of the swap to the weights that were wanted last; "" without one."""

    async def sync(self, wanted: str) -> None:
        """Swaps to the weights at the location `wanted`. Does nothing for RETRY_S after a failed swap to the same
        location. Running requests continue with the new weights.
        """
        if wanted != self.asked:
            self.asked, self.error, self._failed_s = wanted, "", -RETRY_S
        if wanted == self.location or self._now_s() - self._failed_s < RETRY_S:
            return
        staged = StagedModel(self._model_dir)
        try:
            if wanted:
                staged = await asyncio.to_thread(self._stage, wanted)
            await self._engine.load_weights(staged.path)
        except RaytideError as error:
            staged.close()
            if isinstance(error, EngineDeadError):
                raise
            self.error, self._failed_s = str(error), self._now_s()
            return
        before, self._staged = self._staged, staged
        before.close()
        self.location, self.error = wanted, ""


class LiveFields:
    """Applies the live fields to one replica. Reports their state to the GCS, where the controller and other replicas
    read it.
    """

    def __init__(self, application: str, replica: str, engine: Engine, model_dir: str) -> None:
        self._application, self._replica = application, replica
        self._adapters, self._weights = AdapterSync(engine), WeightsSync(engine, model_dir)
        self._reported: bytes = b""

    async def start(self) -> None:
        """Applies the live fields before the replica gets requests. If a load or a swap fails, the failure is reported.
        The replica then serves without the adapter or the new weights.
        """
        await self._follow_once(is_alone=True)

    async def follow(self) -> None:
        """Applies every change of the live fields until the call is cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            try:
                await self._follow_once()
            except Exception as error:  # the GCS restarts, or the engine has died, which `check_health` reports
                log.warning("a replica cannot follow its spec", extra={"replica": self._replica, "error": repr(error)})

    async def _follow_once(self, *, is_alone: bool = False) -> None:
        fields = await asyncio.to_thread(_spec, self._application)
        if fields is None:
            return
        wanted = fields.get("weights", "")
        if is_alone or wanted == self._weights.location or await asyncio.to_thread(self._may_swap, wanted):
            await self._weights.sync(wanted)
        await self._adapters.sync(fields.get("adapters", {}))
        weights = self._weights
        live = {"weights": weights.location, "asked": weights.asked, "error": weights.error}
        report = json.dumps({**live, "adapters": self._adapters.states()}).encode()
        if report != self._reported:
            await asyncio.to_thread(put, live_prefix(self._application) + self._replica.encode(), report)
            self._reported = report

    def _may_swap(self, wanted: str) -> bool:
        prefix, live = replica_prefix(self._application), live_prefix(self._application)
        gcs = ray_internals.connected_gcs()
        replicas = [
            key.removeprefix(prefix).decode()
            for key in gcs.internal_kv_keys(prefix, KV_NAMESPACE, timeout=_GCS_TIMEOUT_S)
        ]
        reports = gcs.internal_kv_multi_get(
            [live + each.encode() for each in replicas], KV_NAMESPACE, timeout=_GCS_TIMEOUT_S
        )
        serving = {key.removeprefix(live).decode(): json.loads(value)["weights"] for key, value in reports.items()}
        return is_its_turn(self._replica, wanted, serving, replicas)


def put(key: bytes, value: bytes) -> None:
    ray_internals.connected_gcs().internal_kv_put(key, value, True, KV_NAMESPACE, timeout=_GCS_TIMEOUT_S)


def _spec(application: str) -> dict[str, Any] | None:
    """Returns the fields of the last deployed spec; None if none is stored yet."""
    key = spec_key(application)
    deployed = ray_internals.connected_gcs().internal_kv_get(key, KV_NAMESPACE, timeout=_GCS_TIMEOUT_S)
    if deployed is None:
        return None
    fields: dict[str, Any] = json.loads(deployed.partition(b" ")[2])
    return fields
