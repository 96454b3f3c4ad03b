"""`rt.train`, `rt.run`, `rt.gang`, ...: what a Client does, on the cluster that `rt.connect(cluster)` finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from raytide.core.specs.train import TrainSpec
from raytide.sdk.client import SpecSource, connect
from raytide.sdk.job_run import Run
from raytide.sdk.train_run import TrainRun

if TYPE_CHECKING:
    from ray.train import ScalingConfig

    from raytide.actors.gang import Gang

P = ParamSpec("P")
T = TypeVar("T")


def train(spec: TrainSpec | SpecSource, *, cluster: str | None = None, **job: object) -> TrainRun:
    """Train; `job` as in `Client.train`."""
    return connect(cluster).train(spec, **job)


def run(script: str | Path, *args: str, cluster: str | None = None, **options: Any) -> Run:
    """Run a script; `options` as in `Client.run`."""
    return connect(cluster).run(script, *args, **options)


def scaling_config(workers: int | tuple[int, int] = 1, *, cluster: str | None = None, **options: Any) -> ScalingConfig:
    """For a trainer of Ray Train; `options` as in `Client.scaling_config`."""
    return connect(cluster).scaling_config(workers, **options)


@contextmanager
def gang(members: int = 1, *, cluster: str | None = None, **options: Any) -> Iterator[Gang]:
    """Hold a gang; `options` as in `Client.gang`."""
    with connect(cluster) as tide, tide.gang(members, **options) as held:
        yield held


def task(*, cluster: str | None = None, **options: Any) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator, as `Client.task`; each call looks for the cluster."""

    def leased(work: Callable[P, T]) -> Callable[P, T]:
        @wraps(work)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with connect(cluster) as tide:
                return tide.task(**options)(work)(*args, **kwargs)

        return run

    return leased
