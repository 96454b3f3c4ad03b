"""Where a member's processes are run from: a Ray actor in the member's placement group, with all that it has.

Answers come as futures, so that nothing in the driver of a script knows Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from raytide.core.gang import Member, Shape

THREADS = 4
"""`report` and `stop` hold one each for as long as they wait, the others answer."""


class MemberHost(Protocol):
    def call(self, method: str, *args: object) -> Future[Any]:
        """Start a method of the MemberProcesses there. The future fails when they are gone."""

    def kill(self) -> None:
        """End them, whatever they are doing."""


StartHost = Callable[[Member, Shape], MemberHost]


class RayHost:
    def __init__(self, member: Member, shape: Shape) -> None:
        import ray

        from raytide.actors.gang.groups import whole_member
        from raytide.actors.gang.processes import MemberProcesses

        actor_class: Any = ray.remote(MemberProcesses)
        options = {**whole_member(member, shape), "max_restarts": 0, "max_concurrency": THREADS}
        self._actor = actor_class.options(**options).remote()

    def call(self, method: str, *args: object) -> Future[Any]:
        answer: Future[Any] = getattr(self._actor, method).remote(*args).future()
        return answer

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)
