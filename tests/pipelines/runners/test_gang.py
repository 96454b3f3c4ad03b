"""The same builds on real Ray, in placement groups that leave no CPU outside them."""

import os
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray.exceptions import ActorUnschedulableError, OutOfMemoryError, RuntimeEnvSetupError
from tests.ray_fixture import own_ray

from raytide.core.errors import DataError
from raytide.core.io.token_dataset import verify
from raytide.core.specs.data import DataSpec, TextFilter
from raytide.pipelines.build import Progress, build
from raytide.pipelines.runners import gang
from raytide.pipelines.runners.gang import MOST_CRASHES, GangRunner, Members, _Item, _LostError, _Worker
from raytide.pipelines.runners.inline import InlineRunner

pytestmark = pytest.mark.cluster

SpecOf = Callable[..., DataSpec]


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    with own_ray("127.0.77.1", cpus=2) as ray:
        yield ray


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members are known to be lost at once."""
    monkeypatch.setattr(gang, "LOST_S", 0.0)


@contextmanager
def leased(ray: Any, cpus: float) -> Iterator[Any]:
    """A placement group like a lease's: one bundle."""
    group = ray.util.placement_group([{"CPU": cpus}])
    ray.get(group.ready(), timeout=300)
    try:
        yield group
    finally:
        ray.util.remove_placement_group(group)


def group_as_member(group: Any) -> Members:
    return lambda: {"0": group}


def files_in(out: str) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(Path(out).rglob("*")) if p.is_file()}


def test_any_number_of_workers_builds_the_bytes_that_one_process_builds(
    ray_cluster: Any, corpus: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytide.pipelines.inputs.MAX_CHUNK_PARTS", 4)  # several tasks for each worker
    alone = spec_of(corpus, out=str(corpus.parent / "alone"))
    build(alone, runner=InlineRunner())
    with leased(ray_cluster, 2) as group:
        for workers in (1, 3):
            spec = spec_of(corpus, out=str(corpus.parent / f"out-{workers}"), workers=workers)
            seen: list[Progress] = []
            assert build(spec, group_as_member(group), seen.append) == verify(spec.out)
            assert files_in(spec.out) == files_in(alone.out)
            assert seen[-1].stage == "done"


def test_a_lease_of_one_cpu_is_enough(ray_cluster: Any, corpus: Path, spec_of: SpecOf) -> None:
    with leased(ray_cluster, 1) as group, leased(ray_cluster, 1):
        assert build(spec_of(corpus), group_as_member(group)).documents == 40


def test_bad_input_that_a_worker_finds_is_the_same_clear_error(
    ray_cluster: Any, tmp_path: Path, spec_of: SpecOf
) -> None:
    pq.write_table(pa.table({"text": [1.5]}), tmp_path / "in.parquet")
    with leased(ray_cluster, 2) as group, pytest.raises(DataError, match="cannot read column 'text'") as caught:
        build(spec_of(tmp_path / "in.parquet"), group_as_member(group))
    assert type(caught.value) is DataError
    assert caught.value.hint == "It must hold strings."
    assert not Path(spec_of(tmp_path).out).exists()


@pytest.mark.parametrize("members", [2, 4])
def test_any_number_of_members_builds_the_bytes_that_one_process_builds(
    ray_cluster: Any, corpus: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch, members: int
) -> None:
    monkeypatch.setattr("raytide.pipelines.inputs.MAX_CHUNK_PARTS", 4)
    alone = spec_of(corpus, out=str(corpus.parent / "alone"), texts="jsonl")
    build(alone, runner=InlineRunner())
    with ExitStack() as stack:
        groups = {str(i): stack.enter_context(leased(ray_cluster, 2 / members)) for i in range(members)}
        spec = spec_of(corpus, texts="jsonl", workers=members)
        assert build(spec, lambda: groups) == verify(spec.out)
    assert files_in(spec.out) == files_in(alone.out)


def test_members_that_come_and_go_leave_no_trace(
    ray_cluster: Any, corpus: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member is lost with its worker while it works, and another one joins, four times over; once none is left."""
    monkeypatch.setattr("raytide.pipelines.inputs.MAX_CHUNK_PARTS", 1)
    alone = spec_of(corpus, out=str(corpus.parent / "alone"))
    build(alone, runner=InlineRunner())
    groups: dict[str, Any] = {}
    made: list[Any] = []

    def join() -> None:
        made.append(ray_cluster.util.placement_group([{"CPU": 0.5}]))
        ray_cluster.get(made[-1].ready(), timeout=300)
        groups[f"{len(made)}"] = made[-1]

    lost = 0

    def lose(progress: Progress) -> None:
        nonlocal lost
        if progress.documents in (5, 15, 25, 35) and progress.stage in ("survey", "encode") and lost < 4:
            lost += 1
            if lost != 3:
                join()
            first = min(groups, key=int)
            ray_cluster.util.remove_placement_group(groups.pop(first))
            if not groups:
                join()

    try:
        join()
        join()
        spec = spec_of(corpus, workers=2)
        manifest = build(spec, lambda: dict(groups), lose)
    finally:
        for group in made:
            ray_cluster.util.remove_placement_group(group)
    assert lost == 4
    assert manifest == verify(spec.out)
    assert files_in(spec.out) == files_in(alone.out)


class Deadly:
    """A stage that ends its process at one task."""

    def __call__(self, task: int) -> int:
        if task == 3:
            os._exit(1)
        return task


def test_a_task_that_ends_its_worker_each_time_fails_the_build_and_no_other_task_is_lost(ray_cluster: Any) -> None:
    with leased(ray_cluster, 1) as group:
        runner = GangRunner(group_as_member(group), 1.0, 1, 1)
        try:
            seen: set[int] = set()
            with pytest.raises(DataError, match="ended 3 workers"):
                seen.update(result for _, result in runner.map(Deadly(), range(6)))
            assert list(runner.map(int, ["7"])) == [(0, 7)], "the pool goes on"
        finally:
            runner.close()
    assert seen >= {0, 1}


@dataclass(frozen=True)
class Part:
    number: int

    @property
    def where(self) -> str:
        return f"part {self.number}"


class DeadlyPart:
    def __call__(self, part: Part) -> int:
        return Deadly()(part.number)


def test_the_task_that_ran_is_blamed_when_those_behind_it_are_lost_with_its_worker(
    ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = set()

    def last_of_all(refs: list[Any], **_: object) -> tuple[list[Any], list[Any]]:
        for worker in runner._workers:
            if any(item.crashes for item in worker.running.values()):
                beside.add(len(worker.running))
        ready, rest = wait(refs, num_returns=len(refs), timeout=60)
        return ready[-1:], [*ready[:-1], *rest]

    wait = ray_cluster.wait
    monkeypatch.setattr(ray_cluster, "wait", last_of_all)
    with leased(ray_cluster, 1) as group:
        runner = GangRunner(group_as_member(group), 1.0, 1, 1)
        try:
            with pytest.raises(DataError, match=r"^part 3 ended 3 workers"):
                list(runner.map(DeadlyPart(), map(Part, range(6))))
        finally:
            runner.close()
    assert beside == {1}, "a result that was not sent yet when the next task ended the worker would be blamed"


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_task_is_not_blamed_for_workers_whose_node_is_lost(monkeypatch: pytest.MonkeyPatch, is_lost: bool) -> None:
    """The last worker is known to be dead some seconds before its member is known to be lost."""
    members = dict.fromkeys("abc")
    runner, item, now_s = GangRunner(lambda: members, 1.0, 1, 3), _Item(0, Part(3)), [0.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds
        if is_lost and now_s[0] > 12.0:
            members.pop("c", None)

    monkeypatch.setattr(gang, "LOST_S", 20.0)
    monkeypatch.setattr(gang, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now_s[0]))
    monkeypatch.setattr(runner, "_oldest_unfinished", lambda worker: item)
    monkeypatch.setattr("ray.kill", lambda actor: None)
    waiting = deque[_Item]()
    with nullcontext() if is_lost else pytest.raises(DataError, match="part 3 ended 3 workers"):
        for name in list(members):
            worker = _Worker(name, None, running={"ref": item})
            runner._workers.append(worker)
            runner._lose(worker, "ref", _LostError(is_actor=True), waiting)
    assert len(item.crashes) == MOST_CRASHES
    assert list(waiting) == [item] * (3 if is_lost else 2)


class Calls:
    """A worker's actor; a reference to a result is the actor's number and the task."""

    def __init__(self, number: int) -> None:
        self.number, self.sent = number, 0
        self.prepare, self.call = (SimpleNamespace(remote=remote) for remote in (self._prepare, self._call))

    def _prepare(self, number: int, stage: object) -> None: ...

    def _call(self, number: int, task: int) -> tuple[int, int, int]:
        self.sent += 1
        assert self.sent < 20, "an actor that is dead gets all tasks again and again"
        return self.number, self.sent, task


@pytest.mark.parametrize("error", [OutOfMemoryError, RuntimeEnvSetupError, ActorUnschedulableError])
@pytest.mark.parametrize("dead", [1, 99])
def test_a_worker_is_replaced_whatever_ray_calls_its_end(
    monkeypatch: pytest.MonkeyPatch, error: Callable[[str], Exception], dead: int
) -> None:
    """Ray's memory monitor, for one, ends actors with an OutOfMemoryError, which is no RayActorError."""
    actors: list[Calls] = []

    def start(group: object) -> Calls:
        actors.append(Calls(len(actors)))
        return actors[-1]

    def get(ref: tuple[int, int, int], timeout: float) -> int:
        if ref[0] < dead:
            raise error("the node was low on memory")
        return ref[2]

    fakes: dict[str, Callable[..., Any]] = {"put": lambda value: value, "get": get, "kill": lambda actor: None}
    fakes["wait"] = lambda refs, **_: (refs[:1], refs[1:])
    for name, fake in fakes.items():
        monkeypatch.setattr(f"ray.{name}", fake)
    runner = GangRunner(lambda: {"a": None}, 1.0, 1, 1)
    monkeypatch.setattr(runner, "_start", start)
    with nullcontext() if dead == 1 else pytest.raises(DataError, match=r"(?s)ended 3 workers: .*low on memory"):
        assert sorted(result for _, result in runner.map(int, [5, 6, 7])) == [5, 6, 7]
        assert len(actors) == 2


def test_cleaning_on_a_gang_gives_the_bytes_that_one_process_gives(
    ray_cluster: Any, tmp_path: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers get the code of own stages, which is not installed there."""
    monkeypatch.setattr("raytide.pipelines.inputs.MAX_CHUNK_PARTS", 2)
    source = random.Random(0)
    texts = [" ".join(str(source.randrange(10**6)) for _ in range(150)) for _ in range(12)]
    texts += [f"{texts[i]} and more" for i in range(4)] + ["keep " + " ".join(texts[5].split()[:60]) + " this"]
    for i, text in enumerate(texts):
        (tmp_path / f"{i:02}.txt").write_text(f"{text} user{i}@example.org")
    (tmp_path / "stage.py").write_text("def check(text):\n    return 'more' not in text or 'and more' in text\n")
    stages = [{"function": f"{tmp_path / 'stage.py'}:check", "kind": "filter"}]
    cleaning = {"rules": {"pii": True, "stages": stages}, "near_duplicates": True, "substrings": True}
    changes = {"cleaning": cleaning, "filter": TextFilter()}
    alone = spec_of(tmp_path / "*.txt", out=str(tmp_path / "alone"), **changes)
    manifest = build(alone, runner=InlineRunner())
    assert manifest.source.dropped == {"near_duplicate": 4}
    with leased(ray_cluster, 2) as group:
        spec = spec_of(tmp_path / "*.txt", out=str(tmp_path / "gang"), workers=2, **changes)
        assert build(spec, group_as_member(group)) == manifest
    assert files_in(spec.out) == files_in(alone.out)
