"""The Ray actor that runs the processes of a gang member. The actor runs in the member's placement group and uses all
resources of the member.

Results are futures of `concurrent.futures`, so that a script's driver does not need Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from raytide.actors.gang.prepared_actor import PreparedActor
from raytide.core.errors import ClusterError, RaytideError
from raytide.core.objects.gang import Member, Shape

THREADS = 4
"""The number of threads of the actor. `report` and `stop` occupy one each while they wait; the others answer further
calls.
"""


class MemberActor(Protocol):
    @property
    def image(self) -> str:
        """The image in which the actor and its processes run, named by its digest. Empty if the job has no image."""

    def call(self, method: str, *args: object) -> Future[Any]:
        """Calls a method of the actor's MemberProcesses and returns a future of its result. If the actor is gone, the
        future raises ClusterError. Otherwise it raises the method's own error, if any.
        """

    def kill(self) -> None:
        """Kills the actor and its processes."""


StartActor = Callable[[Member, Shape], MemberActor]


class RayMemberActor(PreparedActor):
    def __init__(self, member: Member, shape: Shape, image: str | None = None) -> None:
        import ray

        from raytide.actors.gang.member_processes import MemberProcesses
        from raytide.actors.gang.placement_groups import member_options

        actor_class: Any = ray.remote(MemberProcesses)
        options = {**member_options(member, shape), "max_restarts": 0, "max_concurrency": THREADS}
        place = partial(actor_class.options, **options)
        super().__init__(
            lambda **environment: place(**environment).remote(), options["scheduling_strategy"], image=image
        )

    def call(self, method: str, *args: object) -> Future[Any]:
        future: Future[Any] = Future()
        super().call(method, *args).add_done_callback(partial(pass_on, future))
        return future


def pass_on(future: Future[Any], answer: Future[Any]) -> None:
    """Completes `future` with the result in `answer`, which comes from Ray. Ray's errors are translated to
    raytide's.
    """
    from ray.exceptions import RayTaskError

    error = answer.exception()
    if error is None:
        future.set_result(answer.result())
    elif isinstance(error, RayTaskError):
        future.set_exception(error.cause)
    elif isinstance(error, RaytideError):
        future.set_exception(error)
    else:
        future.set_exception(ClusterError(str(error)))


def first_line(error: BaseException | None) -> str:
    """Returns the first line of an error's text, or the name of its class if the text is empty."""
    text = "" if error is None else str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
