"""Where a member's processes are run from: a Ray actor in the member's placement group, with all that it has.

Answers come as futures, so that nothing in the driver of a script knows Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from raytide.core.errors import ClusterError
from raytide.core.objects.gang import Member, Shape

THREADS = 4
"""`report` and `stop` hold one each for as long as they wait, the others answer."""


class MemberActor(Protocol):
    def call(self, method: str, *args: object) -> Future[Any]:
        """Start a method of the MemberProcesses there. The future fails with a ClusterError when they are gone, else
        with what the method raised."""

    def kill(self) -> None:
        """End them, whatever they are doing."""


StartHost = Callable[[Member, Shape], MemberActor]


class RayMemberActor:
    def __init__(self, member: Member, shape: Shape) -> None:
        import ray

        from raytide.actors.gang.member_processes import MemberProcesses
        from raytide.actors.gang.placement_groups import member_options

        actor_class: Any = ray.remote(MemberProcesses)
        options = {**member_options(member, shape), "max_restarts": 0, "max_concurrency": THREADS}
        self._actor = actor_class.options(**options).remote()

    def call(self, method: str, *args: object) -> Future[Any]:
        told: Future[Any] = Future()
        getattr(self._actor, method).remote(*args).future().add_done_callback(partial(pass_on, told))
        return told

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)


def pass_on(told: Future[Any], answer: Future[Any]) -> None:
    """Ray's answer, or its error as a MemberHost's."""
    from ray.exceptions import RayTaskError

    error = answer.exception()
    if error is None:
        told.set_result(answer.result())
    elif isinstance(error, RayTaskError):
        told.set_exception(error.cause)
    else:
        told.set_exception(ClusterError(str(error)))
