"""Runs stages on Ray Data inside a lease, with ordered results and without output on the user's terminal."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raytide.core.errors import ClusterError, RaytideError
from raytide.core.specs.data import DataSpec
from raytide.pipelines.runner import task_batch

if TYPE_CHECKING:
    import pyarrow as pa
    from ray.data import DataContext
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

RESOURCE_UNITS = 10_000
"""Ray counts resources in steps of 1/10000."""


@dataclass(frozen=True, slots=True)
class RayRunner:
    """Runs on part of the connected cluster: `workers` processes with `cpus / workers` each."""

    cpus: float
    workers: int
    placement_group: PlacementGroup | None = None

    @property
    def threads(self) -> int:
        return max(1, int(self.cpus))

    def run(self, function: Callable[[Any], Any], argument: object) -> Any:
        import ray

        task = ray.remote(function).options(num_cpus=self.cpus, scheduling_strategy=self._strategy() or "DEFAULT")
        with _unwrapped_errors():
            return ray.get(task.remote(argument))

    def map_in_order(
        self,
        tasks: Sequence[object],
        function: Callable[..., Any],
        *,
        actor_args: tuple[object, ...] | None = None,
        **kwargs: object,
    ) -> Iterator[pa.Table]:
        import ray.data
        from ray.data import ActorPoolStrategy, DataContext, TaskPoolStrategy

        if not tasks:
            return
        workers = min(self.workers, len(tasks))
        compute: Any = TaskPoolStrategy(workers) if actor_args is None else ActorPoolStrategy(size=workers)
        with DataContext.current(self._context()):
            results = ray.data.from_blocks([task_batch(task) for task in tasks]).map_batches(
                function,
                batch_size=None,
                batch_format="pyarrow",
                zero_copy_batch=True,
                compute=compute,
                fn_constructor_args=actor_args,
                fn_kwargs=kwargs,
                num_cpus=math.floor(self.cpus / self.workers * RESOURCE_UNITS) / RESOURCE_UNITS,
            )
        with _unwrapped_errors():
            yield from results.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)

    def _strategy(self) -> PlacementGroupSchedulingStrategy | None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if self.placement_group is None:
            return None
        return PlacementGroupSchedulingStrategy(self.placement_group, placement_group_capture_child_tasks=True)

    def _context(self) -> DataContext:
        from ray.data import DataContext, ExecutionResources

        context = DataContext.get_current().copy()
        context.execution_options.preserve_order = True
        context.execution_options.resource_limits = ExecutionResources(cpu=self.cpus, gpu=0)
        if (strategy := self._strategy()) is not None:
            # Both are needed, or Ray Data autoscales the cluster instead of using the placement group. Ray marks
            # them as deprecated but has no replacement.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                context.scheduling_strategy = strategy
                context.scheduling_strategy_large_args = strategy
        context.raise_original_map_exception = True
        context.log_internal_stack_trace = False
        context.enable_progress_bars = False
        context.enable_operator_progress_bars = False
        context.print_on_execution_start = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        return context


def ray_runner(spec: DataSpec, placement_group: PlacementGroup | None) -> RayRunner:
    """Returns a runner with all of the lease's CPUs; without a lease, with the CPUs of the spec's first shape."""
    import ray

    if not ray.is_initialized():
        raise ClusterError("this process is not connected to a Ray cluster.", hint="Start one: `raytide up --local`.")
    if placement_group is None:
        cpus = spec.gang.shapes[0].resources["CPU"]
    else:
        cpus = sum(bundle.get("CPU", 0.0) for bundle in placement_group.bundle_specs)
    return RayRunner(cpus, spec.workers or max(1, int(cpus)), placement_group)


@contextmanager
def _unwrapped_errors() -> Iterator[None]:
    """Raise a task's RaytideError without Ray's wrapper, and Ray's own failures as ClusterErrors."""
    import ray

    try:
        yield
    except RaytideError as error:
        raise _raytide_cause(error) or error from None
    except Exception as error:
        if (cause := _raytide_cause(error)) is not None:
            raise cause from None
        if isinstance(error, ray.exceptions.RayError) and not isinstance(error, ray.exceptions.RayTaskError):
            raise ClusterError(
                f"the build's Ray tasks failed: {error}.", hint="Build again: no partial output is left."
            ) from error
        raise


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
