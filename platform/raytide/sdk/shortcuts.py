"""The functions `rt.train`, `rt.run`, `rt.jobs` and others. They call the Client method of the same name on the cluster
that `rt.connect(cluster)` finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack

from raytide.control.views import ClusterStatus, CostReport
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.specs.data import DataSpec
from raytide.core.specs.train import TrainSpec
from raytide.registry.rollout.canary import CanarySpec
from raytide.sdk.client import SpecSource, client_task, connect
from raytide.sdk.jobs.flow_run import FlowRun
from raytide.sdk.jobs.job_run import Run
from raytide.sdk.jobs.task import Task
from raytide.sdk.jobs.train_run import TrainRun
from raytide.sdk.options import GangOptions, NodeOptions, ServeOptions
from raytide.sdk.serving.endpoint import EndpointHandle
from raytide.workflows.spec import FlowSpec
from raytide.workflows.sweep.spec import Value

if TYPE_CHECKING:
    from ray.train import ScalingConfig

    from raytide.actors.gang import Gang

P = ParamSpec("P")
T = TypeVar("T")


def status(*, cluster: str | None = None) -> ClusterStatus:
    """Calls `Client.status` of the connected cluster."""
    return connect(cluster).status()


def cost(*, cluster: str | None = None) -> CostReport:
    """Calls `Client.cost` of the connected cluster."""
    return connect(cluster).cost()


def jobs(*, cluster: str | None = None, limit: int = 100) -> list[Run]:
    """Calls `Client.jobs` of the connected cluster."""
    return connect(cluster).jobs(limit=limit)


def data(spec: DataSpec | SpecSource, *, cluster: str | None = None, **options: Unpack[GangOptions]) -> Run:
    """Calls `Client.data` of the connected cluster."""
    return connect(cluster).data(spec, **options)


def train(spec: TrainSpec | SpecSource, *, cluster: str | None = None, **options: Unpack[GangOptions]) -> TrainRun:
    """Calls `Client.train` of the connected cluster."""
    return connect(cluster).train(spec, **options)


def flow(
    flow: FlowSpec | SpecSource,
    *,
    cluster: str | None = None,
    params: Mapping[str, Value] | None = None,
    working_dir: str | Path | None = None,
) -> FlowRun:
    """Calls `Client.flow` of the connected cluster."""
    return connect(cluster).flow(flow, params=params, working_dir=working_dir)


def run(
    script: str | Path,
    *args: str,
    cluster: str | None = None,
    working_dir: str | Path = ".",
    exclude: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    pip: Sequence[str] = (),
    image: str | None = None,
    nproc_per_node: int | str = 1,
    retries: int = 0,
    **options: Unpack[GangOptions],
) -> Run:
    """Calls `Client.run` of the connected cluster."""
    return connect(cluster).run(
        script,
        *args,
        working_dir=working_dir,
        exclude=exclude,
        env=env,
        pip=pip,
        image=image,
        nproc_per_node=nproc_per_node,
        retries=retries,
        **options,
    )


def serve(
    model: str | Path | ServeSpec,
    *,
    cluster: str | None = None,
    name: str = "",
    replicas: int | tuple[int, int] = 1,
    slo_ttft_s: float | None = None,
    slo_target: float | None = None,
    canary: bool | Mapping[str, Any] | CanarySpec = False,
    shadow: float | None = None,
    ab: float | None = None,
    why: str = "",
    **options: Unpack[ServeOptions],
) -> EndpointHandle:
    """Calls `Client.serve` of the connected cluster."""
    return connect(cluster).serve(
        model,
        name=name,
        replicas=replicas,
        slo_ttft_s=slo_ttft_s,
        slo_target=slo_target,
        canary=canary,
        shadow=shadow,
        ab=ab,
        why=why,
        **options,
    )


@contextmanager
def gang(*, cluster: str | None = None, timeout_s: float = 600.0, **options: Unpack[GangOptions]) -> Iterator[Gang]:
    """Calls `Client.gang` of the connected cluster."""
    with connect(cluster) as client, client.gang(timeout_s=timeout_s, **options) as held:
        yield held


def task(
    *, cluster: str | None = None, timeout_s: float = 600.0, retries: int = 3, **options: Unpack[NodeOptions]
) -> Callable[[Callable[P, T]], Task[P, T]]:
    """Returns a decorator like that of `Client.task`. The cluster is looked up at each call of the decorated
    function.
    """
    return lambda work: client_task(lambda: connect(cluster), work, timeout_s, retries, options)


def scaling_config(
    *, cluster: str | None = None, timeout_s: float = 30 * 86_400.0, **options: Unpack[GangOptions]
) -> ScalingConfig:
    """Calls `Client.scaling_config` of the connected cluster."""
    return connect(cluster).scaling_config(timeout_s=timeout_s, **options)
