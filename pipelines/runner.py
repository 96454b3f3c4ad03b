"""How a build's stages are run: on Ray Data (`ray_runner`), or one after the other in this process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pyarrow as pa


class Runner(Protocol):
    @property
    def workers(self) -> int:
        """Processes that map side by side."""

    @property
    def threads(self) -> int:
        """Threads that a function of `run` may use."""

    def run(self, function: Callable[[Any], Any], argument: object) -> Any:
        """`function(argument)`, once, with all CPUs."""

    def map_in_order(
        self,
        tasks: Sequence[object],
        function: Callable[..., Any],
        *,
        actor_args: tuple[object, ...] | None = None,
        **kwargs: object,
    ) -> Iterator[pa.Table]:
        """The tables that `function` yields, in the order of `tasks`, as they become ready.

        `function(batch, **kwargs)` finds its tasks with `payloads(batch)`. With `actor_args` it is a class, made once
        in each of a fixed pool of actors.
        """


class InlineRunner:
    """Everything in this process: for tests, and for a corpus too small to be worth a cluster."""

    workers = 1
    threads = 1

    def run(self, function: Callable[[Any], Any], argument: object) -> Any:
        return function(pickle.loads(pickle.dumps(argument)))  # its own bytes  # nosec B301

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
    """One task as a block of Ray Data."""
    import pyarrow as pa

    return pa.table({"task": pa.array([pickle.dumps(task)], pa.large_binary())})


def batch_tasks(batch: pa.Table) -> Iterator[Any]:
    """The tasks of a batch."""
    for task in batch.column("task"):
        yield pickle.loads(task.as_py())  # by task_batch, in this job's own Ray  # nosec B301
