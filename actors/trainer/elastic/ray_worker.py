"""A rank's worker process, as the driver calls it. The implementation is a Ray actor in its member's placement group.

Results are futures, so the driver does not depend on Ray: tests run the same driver over forked processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from raytide.actors.gang.packages import interpreter_with
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
    """A TrainWorker in a Ray actor. If the spec has packages of its own, a task first installs them on the member's
    node, and then the actor starts in their Python.
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
        self._is_killed = False
        self._actor: Future[Any] = Future()
        if not spec.pip:
            self._actor.set_result(place().remote(*arguments))
            return
        installing: Any = ray.remote(interpreter_with).options(num_cpus=0, max_retries=0, scheduling_strategy=here)

        def start(installed: Future[str]) -> None:
            try:
                environment = {"py_executable": installed.result()}
                self._actor.set_result(place(runtime_env=environment).remote(*arguments))
            except Exception as error:  # pip's, or that of a lost node
                self._actor.set_exception(getattr(error, "cause", None) or error)
            if self._is_killed:
                self.kill()

        def begin(installed: Future[str]) -> None:
            """Continues on another thread: this one is Ray's own and must not wait for Ray."""
            threading.Thread(target=start, args=(installed,), name="start worker", daemon=True).start()

        installing.remote(spec.pip).future().add_done_callback(begin)

    def call(self, method: str, *args: object) -> Future[Any]:
        answer: Future[Any] = Future()
        if self._actor.done() and self._actor.exception() is None:
            answer = getattr(self._actor.result(), method).remote(*args).future()
            return answer

        def ask(started: Future[Any]) -> None:
            if (error := started.exception()) is not None:
                answer.set_exception(error)
            else:
                getattr(started.result(), method).remote(*args).future().add_done_callback(partial(_pass_on, answer))

        self._actor.add_done_callback(ask)
        return answer

    def kill(self) -> None:
        import ray

        self._is_killed = True
        if self._actor.done() and self._actor.exception() is None:
            ray.kill(self._actor.result())


def _pass_on(answer: Future[Any], result: Future[Any]) -> None:
    if (error := result.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result.result())
