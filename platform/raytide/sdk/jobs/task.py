"""Functions whose calls are jobs in the queue. A call runs on a leased node, and runs again if that node is lost."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import update_wrapper
from typing import Generic, ParamSpec, TypeVar

from raytide.actors.gang import Gang
from raytide.core.errors import ClusterError, DataError, UsageError
from raytide.core.objects.gang import Member
from raytide.core.ray_internals import is_without_ray, use_ray_at

P = ParamSpec("P")
T = TypeVar("T")

MOST_AT_ONCE = 64
"""The number of calls of one task that are queued at once. Each has a thread of this process; further calls wait."""
_LOOK_S = 1.0
_REPLACED_WITHIN_S = 30.0
"""The seconds within which raytide reports a lost member. Without a report by then, the member's node counts as
alive."""


class Task(Generic[P, T]):
    """A function whose calls run on leased nodes. A plain call blocks. `remote` and `map` return futures."""

    def __init__(
        self,
        work: Callable[P, T],
        hold: Callable[[str], Gang],
        ray_environment: Callable[[], Mapping[str, str]],
        retries: int,
    ) -> None:
        """`hold` queues a gang of the given name and returns it; `ray_environment` returns the environment variables
        with which this process connects to Ray. Raises UsageError if `work` is a generator or a coroutine."""
        is_generator = inspect.isgeneratorfunction(work) or inspect.isasyncgenfunction(work)
        if is_generator or inspect.iscoroutinefunction(work):
            raise UsageError(
                f"{getattr(work, '__name__', work)} is a generator or a coroutine, which would go on after its lease.",
                hint="Return a list, or call `asyncio.run` in a plain function.",
            )
        update_wrapper(self, work)
        self._work, self._hold, self._ray_environment, self._retries = work, hold, ray_environment, retries
        self._threads = self._new_threads()

    def __getstate__(self) -> dict[str, object]:
        """Returns the state without the threads, so that functions on other nodes may refer to this task."""
        return {name: value for name, value in vars(self).items() if name != "_threads"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._threads = self._new_threads()

    def _new_threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix=f"task-{self._work.__name__}")

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Waits for a node and for the function, and returns its result or raises its exception."""
        if is_without_ray():
            use_ray_at(self._ray_environment())
        with self._hold(self._work.__name__) as gang:
            return call(gang, self._retries, self._work, *args, **kwargs)

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submits the call and returns its future at once."""
        if is_without_ray():  # here, so that threads do not enter Ray together
            use_ray_at(self._ray_environment())
        return self._threads.submit(self, *args, **kwargs)

    def map(self, items: Iterable[object]) -> list[Future[T]]:
        """Submits one call for each item, with the item as its only argument. Returns the futures in the order of the
        items.
        """
        return [self.remote(item) for item in items]  # type: ignore[call-arg, arg-type]  # P has one parameter then


def call(gang: Gang, retries: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `work` on the only member of the gang. Returns its result or raises its exception.

    If the member's process or node is lost, `work` runs again on the replacement. Raises ClusterError if the member
    is lost more than `retries` times, and DataError if this process cannot unpickle the result.
    """
    import ray
    from ray.exceptions import RayError, RaySystemError, RayTaskError, UnserializableException

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
            except (RayTaskError, UnserializableException):  # the latter: its exception cannot be unpickled here
                raise
            except RayError as error:
                if isinstance(error, RaySystemError) and isinstance(error.client_exc, Exception):
                    raise DataError(
                        f"the result of {gang.job_id} cannot be unpickled here: {error.client_exc!r}.",
                        hint="Return what this process can load, such as tensors on the CPU.",
                    ) from error
                why = str(error).partition("\n")[0]
                _wait_for_replacement(gang, member)
                break
            return result
    raise ClusterError(
        f"{gang.job_id} was started {retries + 1} times and did not finish: {why}.", hint="Raise `retries`."
    )


def _wait_for_replacement(gang: Gang, lost: Member) -> None:
    """Waits until the lease shows that the lost member is gone, but at most for a fixed time."""
    deadline = time.monotonic() + _REPLACED_WITHIN_S
    while any(each.incarnation == lost.incarnation for each in gang.members) and time.monotonic() < deadline:
        gang.wait_change(gang.lease.epoch, timeout_s=_LOOK_S)
