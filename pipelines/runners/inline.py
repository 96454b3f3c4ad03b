"""The interface of the runners that execute a build's stages, and the runner that executes them in this process."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

from raytide.pipelines.runners.allocator import keep_freed_memory

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 2
"""The number of tasks given to a worker at a time, so that it never waits for the next."""


class Runner(Protocol):
    @property
    def threads(self) -> int:
        """The number of threads that a function passed to `run` may use."""

    def run(self, function: Callable[[T], R], argument: T) -> R:
        """Runs `function(argument)` once in one worker, and returns its result."""

    def map(self, stage: Callable[[T], R], tasks: Iterable[T]) -> Iterator[tuple[int, R]]:
        """Yields (position, result) for each task, in the order in which results become ready.

        A stage is sent to each worker once. If a worker is lost, its task is run again, so a task must have the same
        result each time.
        """

    def close(self) -> None:
        """Ends the workers."""


@dataclass(frozen=True, slots=True)
class InlineRunner:
    """Runs everything in this process, on threads. The encoding libraries release the GIL, so threads run in
    parallel.
    """

    threads: int = 1

    def run(self, function: Callable[[T], R], argument: T) -> R:
        return function(_copy(argument))

    def map(self, stage: Callable[[T], R], tasks: Iterable[T]) -> Iterator[tuple[int, R]]:
        keep_freed_memory()
        stage = _copy(stage)
        if self.threads == 1:
            for position, task in enumerate(tasks):
                yield position, stage(_copy(task))
            return
        with ThreadPoolExecutor(self.threads) as pool:
            running: dict[Future[R], int] = {}
            try:
                for position, task in enumerate(tasks):
                    running[pool.submit(stage, task)] = position
                    if len(running) >= AHEAD * self.threads:
                        yield from _finished(running)
                while running:
                    yield from _finished(running)
            finally:
                pool.shutdown(cancel_futures=True)

    def close(self) -> None:
        pass


def local_runner(workers: int | None) -> InlineRunner:
    """Returns a runner with `workers` threads, or with one thread for each CPU that this process may use."""
    return InlineRunner(workers or len(os.sched_getaffinity(0)))


def _finished(running: dict[Future[R], int]) -> Iterator[tuple[int, R]]:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        yield running.pop(future), future.result()


def _copy(value: T) -> T:
    """Returns a pickled copy, as a worker of a gang would get."""
    return cast(T, pickle.loads(pickle.dumps(value)))  # of this process  # nosec B301
