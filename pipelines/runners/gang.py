"""Runs stages on a pool of actors in the placement groups of a gang. The gang's members may change.

The pool starts once for all stages of a build. Tasks of a lost member run again elsewhere, and new members join.
Results come back in any order.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from raytide.core.errors import ClusterError, DataError, RaytideError, WaitTimeoutError
from raytide.core.specs.data import DataSpec
from raytide.pipelines.runners.allocator import keep_freed_memory
from raytide.pipelines.runners.inline import AHEAD

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

T = TypeVar("T")
R = TypeVar("R")

Members = Callable[[], "Mapping[str, PlacementGroup | None]"]
"""A function that returns the placement groups of usable members, by names that are never reused; None for a member
without one.
"""

RESOURCE_UNITS = 10_000
"""The number of steps in which Ray counts one unit of a resource."""
BYTES_PER_WORKER = 32 << 20
"""The bytes of input for each worker: starting a worker takes about as long as reading and encoding this much."""
MOST_CRASHES = 3
"""The number of workers that die while running one task, although their members live, after which the task fails the
build.
"""
LOST_S = 20.0
"""The seconds within which a lost node is known to be lost. Its workers are known to be dead sooner."""
POLL_S = 1.0
GET_TIMEOUT_S = 300.0
MEMBERS_TIMEOUT_S = 1800.0
"""The longest wait for a member when there is none."""
REMEMBERED_KEYS = 64
"""The most keys that are remembered for a worker: its first ones, whose texts may still be in its cache."""


class _Process:
    """The actor of the pool. It keeps the stage that it runs."""

    def __init__(self) -> None:
        keep_freed_memory()
        self._stages: dict[int, Callable[[Any], Any]] = {}

    def prepare(self, number: int, stage: Callable[[Any], Any]) -> None:
        self._stages = {number: stage}

    def call(self, number: int, task: Any) -> Any:
        return self._stages[number](task)


@dataclass(slots=True)
class _Item:
    position: int
    task: Any
    crashes: list[str] = field(default_factory=list)
    """The members whose workers died while they ran this task."""
    is_suspect: bool = False
    """True if a worker died that had this task. It then runs with no other task in the worker, so that only the task
    that ends workers is blamed: a task's result is lost too if the next task ends their worker at once.
    """


@dataclass(slots=True, eq=False)
class _Worker:
    member: str
    actor: Any
    prepared: int = 0
    running: dict[Any, _Item] = field(default_factory=dict)
    """The tasks that run in the worker, oldest first."""
    queue: deque[_Item] = field(default_factory=deque)
    """Tasks that wait for this worker, because it has their text."""
    keys: int = 0

    @property
    def has_room(self) -> bool:
        return len(self.running) < AHEAD and not any(item.is_suspect for item in self.running.values())


class GangRunner:
    """Runs stages on `per_member` workers on each member of a gang. It uses at most `most_members` members."""

    def __init__(self, members: Members, cpus: float, per_member: int, most_members: int) -> None:
        self._members, self._most_members = members, most_members
        self._per_member, self._cpus = per_member, cpus
        self._workers: list[_Worker] = []
        self._owners: dict[str, _Worker] = {}
        self._stage = 0

    @property
    def threads(self) -> int:
        return max(1, int(self._cpus))

    def run(self, function: Callable[[T], R], argument: T) -> R:
        return next(result for _, result in self.map(function, [argument]))

    def map(self, stage: Callable[[T], R], tasks: Iterable[T]) -> Iterator[tuple[int, R]]:
        import ray

        self._stage += 1
        sent, source, waiting = ray.put(stage), enumerate(tasks), deque[_Item]()
        idle_since_s = time.monotonic()
        for worker in self._workers:
            worker.queue.clear()
            worker.running.clear()  # of a stage that was given up
        while True:
            self._adjust(waiting)
            for worker in self._usable():
                while worker.has_room and (item := self._next(worker, source, waiting)) is not None:
                    self._submit(worker, sent, item)
            running = {ref: worker for worker in self._workers for ref in worker.running}
            if not running:
                if self._usable() and not waiting:
                    return
                if time.monotonic() - idle_since_s > MEMBERS_TIMEOUT_S:
                    raise WaitTimeoutError(
                        f"no member of the gang was usable for {MEMBERS_TIMEOUT_S:g} s.",
                        hint="Start the build again: it goes on from its finished chunks.",
                    )
                time.sleep(POLL_S / 5)
                continue
            idle_since_s = time.monotonic()
            done, _ = ray.wait(list(running), num_returns=1, timeout=POLL_S)
            for ref in done:
                worker = running[ref]
                if ref not in worker.running:  # its worker was given up just now
                    continue
                try:
                    with _unwrapped_errors():
                        result = ray.get(ref, timeout=GET_TIMEOUT_S)
                except _LostError as error:
                    self._lose(worker, ref, error, waiting)
                    continue
                yield worker.running.pop(ref).position, result

    def close(self) -> None:
        import ray

        for worker in self._workers:
            with suppress(Exception):  # it may be gone
                ray.kill(worker.actor)
        self._workers.clear()

    def _usable(self) -> list[_Worker]:
        usable = self._members().keys()
        return [worker for worker in self._workers if worker.member in usable]

    def _adjust(self, waiting: deque[_Item]) -> None:
        """Starts workers on new members, and takes back the tasks of lost members."""
        members = self._members()
        for worker in [worker for worker in self._workers if worker.member not in members]:
            if not worker.running:
                self._give_up(worker, waiting)
        started = {worker.member for worker in self._workers}
        for name, group in sorted(members.items(), key=lambda item: item[0]):
            missing = self._per_member - sum(worker.member == name for worker in self._workers)
            if missing > 0 and (name in started or len(started) < self._most_members):
                started.add(name)
                self._workers += [_Worker(name, self._start(group)) for _ in range(missing)]

    def _start(self, group: PlacementGroup | None) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        share = math.floor(min(1.0, self._cpus / self._per_member) * RESOURCE_UNITS) / RESOURCE_UNITS
        strategy: Any = "DEFAULT"
        if group is not None:
            strategy = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
        return ray.remote(_Process).options(num_cpus=share, scheduling_strategy=strategy).remote()

    def _submit(self, worker: _Worker, stage: Any, item: _Item) -> None:
        if worker.prepared != self._stage:
            worker.actor.prepare.remote(self._stage, stage)
            worker.prepared = self._stage
        if (key := getattr(item.task, "key", None)) is not None and worker.keys < REMEMBERED_KEYS:
            self._owners[key] = worker
            worker.keys += 1
        worker.running[worker.actor.call.remote(self._stage, item.task)] = item

    def _next(self, worker: _Worker, source: Iterator[tuple[int, Any]], waiting: deque[_Item]) -> _Item | None:
        """Returns the worker's next task: preferably one whose text the worker has cached, and as the last resort one
        that is queued for another worker. Returns None if there is none.
        """
        if worker.queue:
            return worker.queue.popleft()
        if waiting:
            return None if waiting[0].is_suspect and worker.running else waiting.popleft()
        for position, task in source:
            owner = self._owners.get(getattr(task, "key", ""))
            if owner is None or owner is worker or owner not in self._workers:
                return _Item(position, task)
            owner.queue.append(_Item(position, task))
        longest = max(self._workers, key=lambda each: len(each.queue))
        return longest.queue.pop() if longest.queue else None

    def _lose(self, worker: _Worker, ref: Any, error: _LostError, waiting: deque[_Item]) -> None:
        if not error.is_actor:  # the result was lost with its node's memory
            waiting.append(worker.running.pop(ref))
            return
        if worker.member in self._members():
            for item in worker.running.values():
                item.is_suspect = True
            item = self._oldest_unfinished(worker)
            item.crashes.append(worker.member)
            if self._is_to_blame(item):
                where = getattr(item.task, "where", "a task")
                raise DataError(
                    f"{where} ended {MOST_CRASHES} workers: {str(error.__cause__)[:300]}.",
                    hint="It may need more memory than a worker has: give members more, or exclude it.",
                )
        self._give_up(worker, waiting)

    def _is_to_blame(self, item: _Item) -> bool:
        """Returns whether the task ended MOST_CRASHES workers on members that live. Waits until lost members are known
        to be lost: they ended their workers themselves.
        """
        deadline = time.monotonic() + LOST_S
        while sum(name in self._members() for name in item.crashes) >= MOST_CRASHES:
            if time.monotonic() >= deadline:
                return True
            time.sleep(POLL_S)
        return False

    def _oldest_unfinished(self, worker: _Worker) -> _Item:
        """Returns the task that the worker ran when it died: the oldest without a result."""
        import ray

        for ref, item in worker.running.items():
            try:
                ray.get(ref, timeout=POLL_S)
            except Exception:
                return item
        return item

    def _give_up(self, worker: _Worker, waiting: deque[_Item]) -> None:
        import ray

        waiting.extend([*worker.running.values(), *worker.queue])
        worker.running.clear()
        worker.queue.clear()
        self._workers.remove(worker)
        with suppress(Exception):  # it is most likely dead
            ray.kill(worker.actor)


def gang_runner(spec: DataSpec, members: Members | None, size: int) -> GangRunner:
    """Returns a runner whose workers use the CPUs of the gang's members.

    If `members` is None, the workers use as many CPUs as the spec's first shape has. `size` is the size of the corpus
    in bytes. A small corpus gets only as many workers as are worth starting.
    """
    import ray

    if not ray.is_initialized():
        raise ClusterError("this process is not connected to a Ray cluster.", hint="Start one: `raytide up --local`.")
    members = members or (lambda: {"": None})
    first = members()
    group = next(iter(first.values()), None)
    if group is None:
        cpus = spec.gang.shapes[0].resources["CPU"]
    else:
        cpus = sum(bundle.get("CPU", 0.0) for bundle in group.bundle_specs)
    if spec.workers is not None:
        return GangRunner(members, cpus, math.ceil(spec.workers / max(1, len(first))), spec.workers)
    most = math.ceil(size / BYTES_PER_WORKER) or 1
    per_member = max(1, min(int(cpus), most))
    return GangRunner(members, cpus, per_member, math.ceil(most / per_member))


class _LostError(Exception):
    """A worker or one of its results is lost; `is_actor` if it is the worker."""

    def __init__(self, is_actor: bool) -> None:
        super().__init__(is_actor)
        self.is_actor = is_actor


class _unwrapped_errors:  # noqa: N801  # a context
    """Raises a task's RaytideError without Ray's wrapper; turns the loss of a worker into _LostError."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        from ray import exceptions as known

        if error is None:
            return
        if (cause := _raytide_cause(error)) is not None:
            raise cause from None
        if isinstance(error, known.RayError) and not isinstance(error, known.RayTaskError):
            # Some reasons of an actor's end have errors of their own, which are no RayActorErrors.
            others = known.OutOfMemoryError, known.RuntimeEnvSetupError, known.ActorUnschedulableError
            raise _LostError(isinstance(error, (known.RayActorError, *others))) from error


def _raytide_cause(error: BaseException | None) -> RaytideError | None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        # Ray raises an error that is both its own class and ours, with ours as `cause`.
        inner = getattr(error, "cause", None)
        if isinstance(error, RaytideError) and inner is None:
            return error
        error = inner or error.__cause__ or error.__context__
    return None
