"""One call of a function as a job of the queue: it runs on a leased node, and again when that node is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from raytide.actors.gang import Gang
from raytide.core.errors import ClusterError
from raytide.core.objects.gang import Member

P = ParamSpec("P")
T = TypeVar("T")

_LOOK_S = 1.0
_REPLACED_WITHIN_S = 30.0
"""So long the platform may take to say that a member is lost; then its node is there, and was not the cause."""


def call(gang: Gang, retries: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(...)` on the gang's only member. What it raises is raised here; ClusterError when its process or its node
    was lost once more than `retries`. A member that is lost is tried once."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    why = ""
    for _ in range(retries + 1):
        while not gang.members:
            gang.wait_change(gang.lease.epoch, timeout_s=_LOOK_S)
        member = gang.members[0]
        task = ray.remote(work).options(**gang.actor_options(member.index), max_retries=0)
        running = task.remote(*args, **kwargs)
        why = f"{member.node_id} was lost"
        while any(each.incarnation == member.incarnation for each in gang.members):
            if not ray.wait([running], timeout=_LOOK_S)[0]:
                continue
            try:
                result: T = ray.get(running)
            except RayTaskError:
                raise
            except RayError as error:
                why = str(error).partition("\n")[0]
                _wait_for_another(gang, member)
                break
            return result
    raise ClusterError(
        f"{gang.job_id} was started {retries + 1} times, and did not end: {why}.", hint="Raise `retries`."
    )


def _wait_for_another(gang: Gang, lost: Member) -> None:
    """Until the platform says that the member is gone, too."""
    deadline = time.monotonic() + _REPLACED_WITHIN_S
    while any(each.incarnation == lost.incarnation for each in gang.members) and time.monotonic() < deadline:
        gang.wait_change(gang.lease.epoch, timeout_s=_LOOK_S)
