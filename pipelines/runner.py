"""Runs a build's stages: on Ray Data (`ray_runner`), or sequentially in this process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pyarrow as pa


class Runner(Protocol):
    @property
    def workers(self) -> int:
        """Number of parallel processes of `map_in_order`."""

    @property
    def threads(self) -> int:
        """Number of threads that a function of `run` may use."""

    def run(self, function: Callable[[Any], Any], argument: object) -> Any:
        """Run `function(argument)` once, with all CPUs."""

    def map_in_order(
        self,
        tasks: Sequence[object],
        function: Callable[..., Any],
        *,
        actor_args: tuple[object, ...] | None = None,
        **kwargs: object,
    ) -> Iterator[pa.Table]:
        """Yields the tables that `function` yields, in the order of `tasks`, as they become ready.

        `function(batch, **kwargs)` gets its tasks from `batch_tasks(batch)`. With `actor_args` it is a class, created
        once in each of a fixed pool of actors.
        """


class InlineRunner:
    """Runs everything in this process, for tests and small corpora."""

    workers = 1
    threads = 1

    def run(self, function: Callable[[Any], Any], argument: object) -> Any:
        return function(pickle.loads(pickle.dumps(argument)))  # a copy, as on Ray  # nosec B301

    def map_in_order(
        self,
        tasks: Sequence[object],
        function: Callable[..., Any],
        *,
        actor_args: tuple[object, ...] | None = None,
        **kwargs: object,
    ) -> Iterator[pa.Table]:
        call = function if actor_args is None else function(*actor_args)
        for task in tasks:
            yield from call(task_batch(task), **kwargs)


def task_batch(task: object) -> pa.Table:
    """Returns one task as a Ray Data block."""
    import pyarrow as pa

    return pa.table({"task": pa.array([pickle.dumps(task)], pa.large_binary())})


def batch_tasks(batch: pa.Table) -> Iterator[Any]:
    """Yields the tasks of a batch."""
    for task in batch.column("task"):
        yield pickle.loads(task.as_py())  # written by task_batch in this job's Ray  # nosec B301
