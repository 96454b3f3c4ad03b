"""Ray Data inside a lease: where its tasks may run, in which order results come, and nothing on the user's terminal."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raytide.core.data_spec import DataSpec
from raytide.core.errors import ClusterError, RaytideError

if TYPE_CHECKING:
    import pyarrow as pa
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

GRAIN = 10_000
"""Ray counts a resource in steps of 1/10000."""


@dataclass(frozen=True, slots=True)
class Place:
    """The share of the cluster that a build may use: `workers` processes of `cpus / workers` each."""

    cpus: float
    workers: int
    placement_group: PlacementGroup | None = None

    @property
    def worker_cpus(self) -> float:
        return math.floor(self.cpus / self.workers * GRAIN) / GRAIN

    def strategy(self) -> PlacementGroupSchedulingStrategy | None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if self.placement_group is None:
            return None
        return PlacementGroupSchedulingStrategy(self.placement_group, placement_group_capture_child_tasks=True)


def place_for(spec: DataSpec, placement_group: PlacementGroup | None) -> Place:
    """All of the lease's CPUs; without one (a plain Ray cluster) as many as the spec's first shape asks for."""
    if placement_group is None:
        cpus = spec.gang.shapes[0].resources["CPU"]
    else:
        cpus = sum(bundle.get("CPU", 0.0) for bundle in placement_group.bundle_specs)
    return Place(cpus, spec.workers or max(1, int(cpus)), placement_group)


def run_task(place: Place, function: Callable[..., Any], argument: object) -> Any:
    """One Ray task with all CPUs of the place. Its RaytideError comes back as itself."""
    import ray

    task = ray.remote(function).options(num_cpus=place.cpus, scheduling_strategy=place.strategy() or "DEFAULT")
    with _clear_errors():
        return ray.get(task.remote(argument))


def map_in_order(
    place: Place,
    tasks: Sequence[object],
    function: Callable[..., Any],
    *,
    actor_args: tuple[object, ...] | None = None,
    **kwargs: object,
) -> Iterator[pa.Table]:
    """The tables that `function` yields, in the order of `tasks`, as they become ready.

    `function(batch, **kwargs)` finds its tasks with `payloads(batch)`. With `actor_args` it is a class, made once in
    each of a fixed pool of actors.
    """
    import pyarrow as pa
    import ray.data
    from ray.data import ActorPoolStrategy, DataContext, TaskPoolStrategy

    blocks = [pa.table({"task": pa.array([pickle.dumps(task)], pa.large_binary())}) for task in tasks]
    compute: Any = TaskPoolStrategy(place.workers) if actor_args is None else ActorPoolStrategy(size=place.workers)
    with DataContext.current(_context(place)):
        results = ray.data.from_blocks(blocks).map_batches(
            function,
            batch_size=None,
            batch_format="pyarrow",
            zero_copy_batch=True,
            compute=compute,
            fn_constructor_args=actor_args,
            fn_kwargs=kwargs,
            num_cpus=place.worker_cpus,
        )
    with _clear_errors():
        yield from results.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)


def payloads(batch: pa.Table) -> Iterator[Any]:
    """The tasks in a batch that `map_in_order` made."""
    for task in batch.column("task"):
        yield pickle.loads(task.as_py())


def _context(place: Place) -> Any:
    from ray.data import DataContext, ExecutionResources

    context = DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ExecutionResources(cpu=place.cpus, gpu=0)
    if (strategy := place.strategy()) is not None:
        # Both, or Ray Data sizes the cluster by its own load instead of keeping to the placement group.
        context.scheduling_strategy = strategy
        context.scheduling_strategy_large_args = strategy
    context.raise_original_map_exception = True
    context.enable_progress_bars = False
    context.enable_operator_progress_bars = False
    context.print_on_execution_start = False
    context.enable_auto_log_stats = False
    context.log_internal_stack_trace = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return context


@contextmanager
def _clear_errors() -> Iterator[None]:
    """A task's RaytideError comes out of Ray's wrapping as itself; what Ray could not do is a ClusterError."""
    import ray

    try:
        yield
    except RaytideError:
        raise
    except Exception as error:
        cause = _raytide_cause(error)
        if cause is not None:
            raise cause from None
        if isinstance(error, ray.exceptions.RayError) and not isinstance(error, ray.exceptions.RayTaskError):
            raise ClusterError(
                f"the build's Ray tasks could not go on: {error}.",
                hint="Build again: nothing half-written is left behind.",
            ) from error
        raise


def _raytide_cause(error: BaseException | None) -> RaytideError | None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, RaytideError):
            # Ray raises a subclass of both its own error and ours; hand back ours alone.
            inner = getattr(error, "cause", None)
            return inner if isinstance(inner, RaytideError) else error
        error = getattr(error, "cause", None) or error.__cause__ or error.__context__
    return None
