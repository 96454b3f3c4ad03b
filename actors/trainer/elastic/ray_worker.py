"""The interface through which the driver calls a rank's worker process. The implementation is a Ray actor in the
placement group of the rank's member.

Calls return futures, and the driver does not depend on Ray. Tests run the same driver over forked processes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from raytide.actors.gang.prepared_actor import PreparedActor
from raytide.actors.trainer.elastic.rank_assignment import slots_of
from raytide.core.objects.gang import Member, Shape
from raytide.core.specs.train import TrainSpec

THREADS = 8
"""The number of threads of an actor: `train` and `wait_for_exit` hold one each, the others answer polls."""


class RemoteWorker(Protocol):
    @property
    def image(self) -> str:
        """The digest of the image in which the worker runs, or an empty text if the worker runs in no image."""

    def call(self, method: str, *args: object) -> Future[Any]:
        """Calls a method of the remote TrainWorker. The returned future fails if the worker's process dies."""

    def kill(self) -> None:
        """Kills the worker's process."""


StartWorker = Callable[[TrainSpec, Member, Shape], RemoteWorker]


class RayWorker(PreparedActor):
    """A TrainWorker in a Ray actor. If the spec has packages or an image of its own, a task first prepares them on the
    member's node. The actor then starts with the prepared Python interpreter.
    """

    def __init__(self, spec: TrainSpec, member: Member, shape: Shape) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from raytide.actors.gang.placement_groups import placement_group_of
        from raytide.actors.trainer.elastic.worker import TrainWorker

        need = {name: amount / slots_of(shape) for name, amount in shape.resources.items()}
        cpus, gpus, memory = need.pop("CPU", 0.0), need.pop("GPU", 0.0), need.pop("memory", 0.0)
        here = PlacementGroupSchedulingStrategy(placement_group_of(member), placement_group_bundle_index=0)
        actor_class: Any = ray.remote(TrainWorker)
        place = partial(
            actor_class.options,
            num_cpus=cpus,
            num_gpus=gpus,
            memory=memory or None,
            resources=need,
            max_restarts=0,
            max_concurrency=THREADS,
            scheduling_strategy=here,
        )
        arguments = (spec, max(1, int(cpus)), member.address)
        super().__init__(
            lambda **environment: place(**environment).remote(*arguments), here, pip=spec.pip, image=spec.image
        )
