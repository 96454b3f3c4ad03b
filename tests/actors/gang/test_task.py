"""One call on a leased node, over a Ray whose nodes die."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import cloudpickle
from ray.exceptions import NodeDiedError, RayError, RaySystemError, RayTaskError, UnserializableException

import raytide as rt
from raytide.core.errors import ClusterError, DataError, NotFoundError, UsageError
from raytide.core.objects.gang import Lease, LeaseState, Member, MemberState, Shape
from raytide.sdk.jobs import task as tasks

FIRST = Member(0, MemberState.READY, "node-0", "ray-0", "", "0" * 36)
LEASE = Lease("lease-1", "job-1", Shape(resources={"CPU": 1.0}), LeaseState.ACTIVE, (FIRST,), epoch=1)


class Held:
    """A gang; the platform sees that a node died only at the third look, and then gives another."""

    job_id = "job-1"

    def __init__(self, replaced_after: int = 3) -> None:
        self.lease, self._looks = LEASE, replaced_after

    @property
    def members(self) -> tuple[Member, ...]:
        return self.lease.usable

    def actor_options(self, index: int) -> dict[str, object]:
        return {}

    def wait_change(self, newer_than: int, *, timeout_s: float) -> Lease:
        self._looks -= 1
        if self._looks == 0:
            again = replace(self.members[0], incarnation=self.members[0].incarnation + 1)
            self.lease, self._looks = replace(self.lease, members=(again,), epoch=self.lease.epoch + 1), 3
        return self.lease


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns the ends of the tries, first the last; those that were tried are gone from it."""
    ends: list[Any] = []

    def get(_: object) -> object:
        end = ends.pop()
        if isinstance(end, Exception):
            raise end
        return end

    remote = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: "running"))
    monkeypatch.setattr(ray, "remote", lambda _: remote)
    monkeypatch.setattr(ray, "wait", lambda running, timeout: (running, []))
    monkeypatch.setattr(ray, "get", get)
    return ends


def call(retries: int, gang: Held | None = None) -> object:
    return tasks.call(gang or Held(), retries, lambda: 0)  # type: ignore[arg-type]


def test_a_lost_node_costs_one_retry_however_late_it_is_known(tried: list[Any]) -> None:
    gang = Held()
    tried[:] = ["result", NodeDiedError("died")]
    assert call(1, gang) == "result"
    assert gang.members[0].incarnation == 1


def test_a_process_that_dies_on_a_node_that_stays_is_tried_there_again(
    tried: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "_REPLACED_WITHIN_S", 0.0)
    tried[:] = ["result", NodeDiedError("died")]
    assert call(1, Held(replaced_after=-1)) == "result"


def test_after_its_retries_it_says_why(tried: list[Any]) -> None:
    tried[:] = [NodeDiedError("node-0 died\nmore"), NodeDiedError("died")]
    with pytest.raises(ClusterError, match="job-1 was started 2 times and did not finish: node-0 died"):
        call(1)


def test_what_the_function_raises_is_raised_and_not_tried_again(tried: list[Any]) -> None:
    raised = RayTaskError("work", "Traceback ...", ValueError("odd"), ip="127.0.0.1", proctitle="x")
    tried[:] = ["result", raised.as_instanceof_cause()]
    with pytest.raises(ValueError, match="ip="):
        call(3)
    assert tried == ["result"]


class OddError(Exception):
    """It can be pickled, and not be unpickled."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"{why} ({code})")


def test_an_exception_that_cannot_be_unpickled_is_raised_and_not_tried_again(tried: list[Any]) -> None:
    raised = RayTaskError("work", "Traceback ... odd (7)", OddError(7, "odd"), ip="127.0.0.1", proctitle="x")
    tried[:] = ["result", RayError.from_bytes(raised.to_bytes())]
    with pytest.raises(UnserializableException, match="Failed to deserialize exception"):
        call(3)
    assert tried == ["result"]


def test_a_result_that_cannot_be_unpickled_is_not_computed_again(tried: list[Any]) -> None:
    no_gpu = RuntimeError("Attempting to deserialize object on a CUDA device")
    tried[:] = ["result", RaySystemError(no_gpu, "Traceback ...")]
    with pytest.raises(DataError, match=r"the result of job-1 cannot be unpickled here: .*CUDA device"):
        call(3)
    assert tried == ["result"]
    tried[:] = ["result", RaySystemError("the worker did not start")]
    assert call(1) == "result"


def test_what_would_go_on_after_its_lease_is_no_task() -> None:
    def numbers() -> Iterator[int]:
        yield 1

    async def number() -> int:
        return 1

    async def stream() -> AsyncIterator[int]:
        yield 1

    works: tuple[Callable[[], object], ...] = (numbers, number, stream)
    for work in works:
        with pytest.raises(UsageError, match=f"{work.__name__} is a generator or a coroutine"):
            rt.task(cpus=1)(work)


def test_calls_return_futures_and_each_is_a_job_of_its_own(tried: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in of Ray returns 4, 3, 2, 1 in this order, so the results are those, in any."""
    monkeypatch.setattr(tasks, "is_without_ray", lambda: False)
    tried += [1, 2, 3, 4]
    names: list[str] = []

    class Entered(Held):
        def __enter__(self) -> Entered:
            return self

        def __exit__(self, *_: object) -> None: ...

    def hold(name: str) -> Any:
        names.append(name)
        return Entered()

    def double(x: int) -> int:
        return 2 * x

    task = tasks.Task(double, hold, dict, 3)
    futures = [*task.map([1, 2]), task.remote(3)]
    assert sorted([*(future.result(timeout=60) for future in futures), task(4)]) == [1, 2, 3, 4]
    assert names == ["double"] * 4
    assert task.__name__ == "double"


def test_a_function_on_another_node_may_refer_to_tasks(tried: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray pickles functions with cloudpickle."""
    monkeypatch.setattr(tasks, "is_without_ray", lambda: False)

    @rt.task(cpus=1)
    def plus_one(x: int) -> int:
        return x + 1

    @rt.task(cluster="other")
    def total(x: int) -> int:
        """Refers to another task and to itself."""
        return plus_one.__wrapped__(x) + total.__wrapped__(x - 1) if x else 0

    copy = cloudpickle.loads(cloudpickle.dumps(total))
    assert copy.__wrapped__(3) == 4 + 3 + 2
    with pytest.raises(NotFoundError, match="other"):
        copy.remote(1).result(timeout=60)
