"""A Serve deployment in which each replica owns one engine process. Serve only places, counts and checks the
replicas.
"""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raytide.actors.engine.model.parallel.launcher import Invitation, LocalMembers
from raytide.actors.models.model_cache import staged_model
from raytide.actors.serving.engine_child import EngineChild
from raytide.actors.serving.engines import member_module
from raytide.actors.serving.ray_serve.application import DEPLOYMENT, SPANNING
from raytide.actors.serving.ray_serve.installation import GcsKeyValues, Installation
from raytide.actors.serving.ray_serve.keys import KV_NAMESPACE, ReplicaAddress, log_prefix, replica_key, startup_prefix
from raytide.actors.serving.ray_serve.live_fields import LiveFields, put
from raytide.actors.serving.ray_serve.replica_log import own_log
from raytide.actors.serving.ray_serve.startup import READY, StartupLog
from raytide.core import ray_internals
from raytide.core.errors import EngineError
from raytide.core.io.process import Process
from raytide.core.objects.endpoint import LIVE_FIELDS, Endpoint, ServeSpec
from raytide.scheduling.replicas import replica_selector

HEALTH_CHECK_PERIOD_S = 2.0
HEALTH_CHECK_TIMEOUT_S = 20.0
DRAIN_S = 60.0
"""The time that a stopping replica may take to finish its requests."""
END_S = 15.0
"""The seconds after DRAIN_S within which the engine's process must end."""
METRICS_PERIOD_S = 0.5
LOAD_WINDOW_S = 1.0
_GCS_TIMEOUT_S = 10.0
_MEMBER_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 600.0
"""The time for the start of the other members' actors, which copy the model to their nodes first."""


class EngineReplica:
    """Starts an engine process and owns it. Requests go to that process directly, not through this replica."""

    async def __init__(self, spec: dict[str, Any]) -> None:  # type: ignore[misc] # Serve awaits it
        parsed = ServeSpec.parse(spec, where="endpoint")
        _limit_threads(parsed.resources.get("CPU", 0.0))
        self._name = serve.get_replica_context().replica_id.unique_id
        self._key = replica_key(parsed.name, self._name)
        startup = StartupLog(partial(put, startup_prefix(parsed.name) + self._name.encode()), _began_at_s())
        put(log_prefix(parsed.name) + self._name.encode(), own_log(_began_at_s()))
        startup.begin("stage")
        self._model = await asyncio.to_thread(staged_model, parsed.model, startup.progress)
        startup.staged(self._model.bytes)
        host = ray.util.get_node_ip_address()
        packages = Installation(parsed.name, ray.get_runtime_context().get_node_id(), GcsKeyValues())
        self._hosts = MemberHosts(parsed, actor_options(parsed))
        self._child = await EngineChild.start(
            parsed,
            host,
            self._name,
            model_dir=self._model.path,
            on_phase=startup.begin,
            bring_members=self._hosts.bring,
            install=packages.python,
        )
        live = LiveFields(parsed.name, self._name, self._child.engine, self._model.path)
        await live.start()
        put(self._key, ReplicaAddress(host, self._child.port, self._child.secret, self._child.metrics).dump())
        if parsed.pip:
            packages.begun()
        startup.begin(READY)
        self._following = asyncio.create_task(live.follow())

    async def check_health(self) -> None:
        """Raises EngineError if the engine is broken. Serve replaces the replica after three failures in a row, or as
        soon as the replica's process has ended.
        """
        if problem := self._child.problem() or await self._hosts.problem():
            raise EngineError(f"replica {self._name}: {problem}.")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the engine's load counters. Serve polls this method and passes the counters to the policy in
        `policy.py`.
        """
        return self._child.load()

    async def __del__(self) -> None:
        """Stops the engine, when Serve stops the replica. Running requests end first, or continue elsewhere."""
        if hasattr(self, "_following"):
            self._following.cancel()
        if hasattr(self, "_child"):  # not when the engine's options were refused
            with suppress(Exception):  # the controller deletes it otherwise
                ray_internals.connected_gcs().internal_kv_del(self._key, False, KV_NAMESPACE, timeout=_GCS_TIMEOUT_S)
            await self._child.stop(DRAIN_S)


def _began_at_s() -> float:
    """Returns the Unix time at which this process began, in seconds."""
    process = Process.of(os.getpid())
    assert process is not None
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_time / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def application(endpoint: Endpoint) -> serve.Application:
    spec = endpoint.spec
    deployment: Any = serve.deployment(
        EngineReplica,
        **_placing(spec),
        autoscaling_config=_autoscaling(endpoint),
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=DRAIN_S + END_S,
        graceful_shutdown_wait_loop_s=0.5,
    )
    bound: serve.Application = deployment.bind(spec.model_dump(exclude=set(LIVE_FIELDS)))
    return bound


def _placing(spec: ServeSpec) -> dict[str, Any]:
    """Returns the options that place one replica: as an actor or, for several members, as the first bundle of a
    placement group with one bundle per member. The label selector marks the replica's owner.
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
    """Returns Ray's options for the actor of one member of a replica."""
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
            min_replicas=min(replicas.least, 1),  # a rollout's two revisions share the configured minimum
            initial_replicas=min(max(endpoint.target_replicas, min(replicas.least, 1)), replicas.most),
            max_replicas=replicas.most,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            metrics_interval_s=METRICS_PERIOD_S,
            look_back_period_s=LOAD_WINDOW_S,
            policy=AutoscalingPolicy(policy_function="raytide.actors.serving.ray_serve.policy:published_target"),
        )


def _limit_threads(cpus: float) -> None:
    """Limits the threads of this process to its replica's CPUs. Must run before torch is imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(max(1, int(cpus)))


class MemberHost:
    """An actor that starts and owns the member processes of a replica on one node."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = ServeSpec.parse(spec, where="endpoint")
        self._members: LocalMembers | None = None

    def start(self, invitation: Invitation, index: int, local_size: int, cpus: float) -> None:
        """Starts the member processes in bundle `index` of the replica's placement group. The processes connect to the
        replica's leader by themselves.
        """
        model_dir = staged_model(self._spec.model, lambda *_: None).path
        module, options = member_module(self._spec)
        self._members = LocalMembers(
            range(index * local_size, (index + 1) * local_size),
            local_size=local_size,
            host=ray.util.get_node_ip_address(),
            threads=max(1, int(cpus) // local_size),
            model_dir=model_dir,
            module=module,
            options=options,
        )
        self._members.launch(invitation)

    def problem(self) -> str | None:
        """Returns a text that names a member process that has ended. Returns None if all are running."""
        return None if self._members is None else self._members.problem()


class MemberHosts:
    """The members of a replica that spans nodes, except the members in the replica's first bundle.

    In every bundle of the placement group except the first, a MemberHost actor owns the member processes. The processes
    end with the replica.
    """

    def __init__(self, spec: ServeSpec, options: dict[str, Any]) -> None:
        self._spec, self._options = spec, options
        self._actors: list[Any] = []

    async def bring(self, invitation: Invitation) -> None:
        """Starts the members in all bundles except the first, and watches them until the call is cancelled. Raises
        EngineError if a member cannot be started. Also raises EngineError if a running member exits.
        """
        group = ray.util.get_current_placement_group()
        if group is None:
            raise EngineError("a replica of several members has no placement group.", hint="Deploy the endpoint again.")
        spec, starts = self._spec, list[Any]()
        local_size = invitation.size // spec.members
        for index in range(1, spec.members):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            actor: Any = (
                ray.remote(MemberHost).options(**self._options, scheduling_strategy=strategy).remote(spec.model_dump())
            )
            self._actors.append(actor)
            starts.append(actor.start.remote(invitation, index, local_size, spec.resources.get("CPU", 0.0)))
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await asyncio.gather(*starts)
        except (TimeoutError, ray.exceptions.RayError) as error:
            raise EngineError(
                f"the members of a replica of endpoint {spec.name} did not start: {error}.", hint="See their nodes."
            ) from None
        while True:
            if problem := await self.problem():
                raise EngineError(f"endpoint {spec.name}: {problem} during the replica's start.", hint="See its log.")
            await asyncio.sleep(HEALTH_CHECK_PERIOD_S)

    async def problem(self) -> str | None:
        """Returns the reason why the members on other nodes cannot compute. Returns None if they can."""
        asked = [actor.problem.remote() for actor in self._actors]
        try:
            async with asyncio.timeout(_MEMBER_TIMEOUT_S):
                found = await asyncio.gather(*asked)
        except TimeoutError:
            return f"a member did not answer for {_MEMBER_TIMEOUT_S:.0f} s"
        except ray.exceptions.RayError as error:
            return f"a member is gone: {error}"
        return next((problem for problem in found if problem), None)
