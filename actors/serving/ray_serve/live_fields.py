"""Follows the fields of an endpoint's spec that its running replicas take over: adapters and weights."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from raytide.actors.engine.base import Engine
from raytide.actors.serving.ray_serve.adapters import AdapterSync
from raytide.actors.serving.ray_serve.keys import KV_NAMESPACE, live_prefix, replica_prefix, spec_key
from raytide.actors.serving.ray_serve.weights import WeightsSync, is_its_turn
from raytide.core import ray_internals
from raytide.core.logs import logger

log = logger(__name__)

_PERIOD_S = 1.0
"""The time between two looks at the spec in the GCS."""
_GCS_TIMEOUT_S = 10.0


class LiveFields:
    """Applies them to one replica, which reports its state to the GCS, for the controller and the other replicas."""

    def __init__(self, application: str, replica: str, engine: Engine, model_dir: str) -> None:
        self._application, self._replica = application, replica
        self._adapters, self._weights = AdapterSync(engine), WeightsSync(engine, model_dir)
        self._reported: bytes = b""

    async def start(self) -> None:
        """Takes over the fields before the replica gets requests."""
        await self._follow_once(is_alone=True)

    async def follow(self) -> None:
        """Takes over every change until it is cancelled."""
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
    """Returns the fields of the spec that was deployed last; None before the first one is there."""
    key = spec_key(application)
    deployed = ray_internals.connected_gcs().internal_kv_get(key, KV_NAMESPACE, timeout=_GCS_TIMEOUT_S)
    if deployed is None:
        return None
    fields: dict[str, Any] = json.loads(deployed.partition(b" ")[2])
    return fields
