"""A rank's worker process as the driver calls it, implemented as a Ray actor in its member's placement group.

Results are futures, so the driver does not depend on Ray: tests run the same driver over forked processes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from raytide.actors.trainer.elastic.rank_assignment import slots_of
from raytide.core.objects.gang import Member, Shape
from raytide.core.specs.train import TrainSpec

THREADS = 8
"""Threads of an actor: `train` and `wait_for_exit` hold one each, the others answer polls."""


class RemoteWorker(Protocol):
    def call(self, method: str, *args: object) -> Future[Any]:
        """Call a method of the remote TrainWorker. The future fails if its process dies."""

    def kill(self) -> None:
        """Kill the process."""


StartWorker = Callable[[TrainSpec, Member, Shape], RemoteWorker]


class RayWorker:
    def __init__(self, spec: TrainSpec, member: Member, shape: Shape) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from raytide.actors.gang.placement_groups import placement_group_of
        from raytide.actors.trainer.elastic.worker import TrainWorker

        need = {name: amount / slots_of(shape) for name, amount in shape.resources.items()}
        cpus, gpus, memory = need.pop("CPU", 0.0), need.pop("GPU", 0.0), need.pop("memory", 0.0)
        actor_class: Any = ray.remote(TrainWorker)
        placed = actor_class.options(
            num_cpus=cpus,
            num_gpus=gpus,
            memory=memory or None,
            resources=need,
            max_restarts=0,
            max_concurrency=THREADS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group_of(member), placement_group_bundle_index=0
            ),
        )
        self._actor = placed.remote(spec, max(1, int(cpus)), member.address)

    def call(self, method: str, *args: object) -> Future[Any]:
        answer: Future[Any] = getattr(self._actor, method).remote(*args).future()
        return answer

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)
