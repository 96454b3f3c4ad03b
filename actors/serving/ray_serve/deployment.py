"""A Serve deployment whose replicas contain the engine and answer HTTP: no token crosses a Serve handle."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import warnings
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, BackpressureConfig

from raytide.actors.serving.engines import build_engine
from raytide.actors.serving.http.app import create_app
from raytide.actors.serving.openai_api.errors import RETRY_AFTER_S
from raytide.actors.serving.openai_api.server import Server
from raytide.actors.serving.ray_serve.application import DEPLOYMENT, SPANNING
from raytide.core.errors import EngineError
from raytide.core.objects.endpoint import Endpoint, ServeSpec
from raytide.scheduling.replicas import replica_selector

_log = logging.getLogger(__name__)

HEALTH_CHECK_PERIOD_S = 2.0
HEALTH_CHECK_TIMEOUT_S = 20.0
DRAIN_S = 60.0
"""The time that a stopping replica may take to finish its requests."""
METRICS_PERIOD_S = 0.5
PROBLEM_PERIOD_S = 0.5
LAST_WORDS_S = 1.0
"""The time from the detection of a broken engine to the end of the process, in which open requests get their errors."""
LOAD_WINDOW_S = 1.0


@serve.ingress()
class EngineReplica:
    async def __init__(self, spec: dict[str, Any]) -> None:  # type: ignore[misc] # Serve awaits it
        parsed = ServeSpec.parse(spec, where="endpoint")
        _limit_threads(parsed.resources.get("CPU", 0.0))
        replica = serve.get_replica_context().replica_id.unique_id
        slo_ttft_s = parsed.replicas.slo_ttft_s
        self._server = Server(
            build_engine(parsed),
            model=parsed.name,
            replica=replica,
            drain_s=DRAIN_S,
            slo_ttft_s=slo_ttft_s,
            min_priority=parsed.min_request_priority,
        )
        await self._server.start()
        # A full collection would go through all that was loaded, and stop the replica for 0.2 s.
        gc.collect()
        gc.freeze()
        self._watching = asyncio.create_task(_exit_when_broken(self._server))

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._server, owns_server=False)

    async def check_health(self) -> None:
        """Serve replaces the replica after three failures in a row, or as soon as its process has ended."""
        if problem := await self._server.problem():
            raise EngineError(f"replica {self._server.replica}: {problem}.")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the load counters. Serve polls them several times a second and passes them to `policy.py`."""
        return self._server.metrics.load_counters(await self._server.engine.stats())

    async def __del__(self) -> None:
        """Serve calls this once when the replica stops, after its requests have ended."""
        if hasattr(self, "_server"):  # not when the engine's options were refused
            if hasattr(self, "_watching"):
                self._watching.cancel()
            await self._server.stop()


async def _exit_when_broken(server: Server) -> None:
    """Ends this process soon after the engine is found dead or hanging. A broken replica would fail requests at once,
    attract more of them from a router that prefers idle replicas, and be given a minute by Serve to finish.
    """
    while True:
        problem = await server.problem()
        if problem is not None:
            break
        await asyncio.sleep(PROBLEM_PERIOD_S)
    _log.critical("replica %s ends itself: %s", server.replica, problem)
    await asyncio.sleep(LAST_WORDS_S)  # open requests get their errors
    os._exit(1)


def application(endpoint: Endpoint) -> serve.Application:
    spec = endpoint.spec
    deployment: Any = serve.deployment(
        EngineReplica,
        **_placing(spec),
        max_ongoing_requests=spec.max_ongoing,
        max_queued_requests=spec.max_ongoing * spec.replicas.max,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=RETRY_AFTER_S),
        autoscaling_config=_autoscaling(endpoint),
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=DRAIN_S,
        graceful_shutdown_wait_loop_s=0.5,
    )
    bound: serve.Application = deployment.bind(spec.model_dump())
    return bound


def _placing(spec: ServeSpec) -> dict[str, Any]:
    """Returns the options that place one replica: an actor, or the first member of a placement group with a bundle for
    each member. The label selector marks its owner.
    """
    selector = replica_selector(spec)
    if spec.members == 1:
        return {"name": DEPLOYMENT, "ray_actor_options": {**actor_options(spec), "label_selector": selector}}
    return {
        "name": SPANNING,
        "ray_actor_options": actor_options(spec),
        "placement_group_bundles": [dict(spec.resources) for _ in range(spec.members)],
        "placement_group_bundle_label_selector": [selector for _ in range(spec.members)],
        "placement_group_strategy": "PACK",
    }


def actor_options(spec: ServeSpec) -> dict[str, Any]:
    """Returns Ray's options for one member."""
    resources = dict(spec.resources)
    options: dict[str, Any] = {"num_cpus": resources.pop("CPU", 0.0), "num_gpus": resources.pop("GPU", 0.0)}
    if memory := resources.pop("memory", 0.0):
        options["memory"] = memory
    if resources:
        options["resources"] = resources
    return options


def _autoscaling(endpoint: Endpoint) -> AutoscalingConfig:
    """Returns a policy that only follows raytide's targets: Serve's own delays are zero and its window is short."""
    replicas = endpoint.spec.replicas
    with warnings.catch_warnings():
        # Ray 2.60 calls `metrics_interval_s` deprecated; the environment variables that replace it are not read yet.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=replicas.min,
            initial_replicas=min(max(endpoint.target_replicas, replicas.min), replicas.most),
            max_replicas=replicas.most,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            metrics_interval_s=METRICS_PERIOD_S,
            look_back_period_s=LOAD_WINDOW_S,
            policy=AutoscalingPolicy(policy_function="raytide.actors.serving.ray_serve.policy:published_target"),
        )


def _limit_threads(cpus: float) -> None:
    """Limits this process to its replica's CPUs; must run before torch is imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(max(1, int(cpus)))
