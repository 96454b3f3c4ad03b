"""The SDK: `rt.connect()` gives a Client, a Client gives runs and endpoints, and everything shows itself in a notebook."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from raytide.control.client import ApiClient
from raytide.control.views import ClusterStatus, CostReport, JobView
from raytide.core.config import Config, load_yaml
from raytide.core.errors import UsageError
from raytide.core.io.working_dir import pack
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import JobKind, JobSpec
from raytide.core.ray_internals import is_without_ray, use_ray_at
from raytide.core.specs.data import DataSpec
from raytide.core.specs.script import ScriptSpec
from raytide.core.specs.train import TrainSpec
from raytide.sdk.endpoint import EndpointHandle
from raytide.sdk.job_run import Run
from raytide.sdk.script import command_of, shape, shapes_of
from raytide.sdk.train_run import TrainRun, run_of

if TYPE_CHECKING:
    from ray.train import ScalingConfig

    from raytide.actors.gang import Gang

P = ParamSpec("P")
T = TypeVar("T")
_Spec = TypeVar("_Spec", bound=Config)
SpecSource = Mapping[str, object] | str | Path
"""A spec as a mapping, or the path of a YAML file that holds one."""


class Client:
    """One cluster, seen by one user. A context manager: leaving it ends a cluster that `rt.local()` started."""

    def __init__(self, client: ApiClient, *, on_exit: Callable[[], object] | None = None) -> None:
        self.client = client
        self._on_exit = on_exit

    def status(self) -> ClusterStatus:
        return self.client.status()

    def cost(self) -> CostReport:
        return self.client.cost()

    def jobs(self, *, limit: int = 100) -> list[Run]:
        """The latest jobs, newest first."""
        return [run_of(self.client, view) for view in self.client.jobs(limit=limit)]

    def job(self, job_id: str) -> Run:
        return run_of(self.client, self.client.job(job_id))

    def data(self, spec: DataSpec | SpecSource, **job: object) -> Run:
        """Build a token dataset on a leased node; `job` as in `train`."""
        data = spec if isinstance(spec, DataSpec) else _parse(DataSpec, spec)
        config = data.model_dump(mode="json")
        return Run(self.client, self._submit(JobKind.DATA, data.name, _team_of(data), data.gang, config, job))

    def train(self, spec: TrainSpec | SpecSource, **job: object) -> TrainRun:
        """Train on a gang; it survives the loss of members.

        `job` is for the queue, by the names of JobSpec: priority, preemptible, budget_usd (in all; each month with
        budget_per="month"), deadline (a datetime with a time zone, or seconds from now), estimate_h, labels,
        max_restarts.
        """
        train = spec if isinstance(spec, TrainSpec) else _parse(TrainSpec, spec)
        config = train.model_dump(mode="json")
        return TrainRun(self.client, self._submit(JobKind.TRAIN, train.name, _team_of(train), train.asks, config, job))

    def run(
        self,
        script: str | Path,
        *args: str,
        shapes: Sequence[Shape] = (),
        gpus: float = 0.0,
        cpus: float | None = None,
        nodes: int | tuple[int, int] = 1,
        selector: Mapping[str, str] | None = None,
        working_dir: str | Path = ".",
        exclude: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        nproc_per_node: int | str = 1,
        retries: int = 0,
        name: str = "",
        team: str | None = None,
        **job: object,
    ) -> Run:
        """Run a script on every node of a gang, with RANK, WORLD_SIZE and MASTER_ADDR as torchrun sets them.

        `gpus` and `cpus` are of each node, `nodes=(1, 4)` is elastic, `selector` is of nodes' labels; or `shapes`, in
        order of preference. The working directory is uploaded. Without a `team` it is the token's. `job` as in `train`.
        """
        folder = Path(working_dir)
        command = command_of(str(script), args, folder)
        wanted = shapes_of(shapes, gpus=gpus, cpus=cpus, nodes=nodes, selector=selector)
        fields = {"command": command, "env": dict(env or {}), "nproc_per_node": nproc_per_node, "retries": retries}
        spec = ScriptSpec.parse(fields, where="run")
        config = {**spec.model_dump(mode="json"), "package": self.client.upload(pack(folder, tuple(exclude)))}
        named = name or Path(script).stem
        return Run(self.client, self._submit(JobKind.SCRIPT, named, team, GangSpec(shapes=wanted), config, job))

    def serve(
        self,
        model: str | Path | ServeSpec,
        *,
        name: str = "",
        replicas: tuple[int, int] = (1, 1),
        slo_ttft_s: float | None = None,
        slo_target: float | None = None,
        **options: object,
    ) -> EndpointHandle:
        """Serve a Hugging Face directory; `options` are ServeSpec's. The replicas' number follows the load: with
        `slo_target`, as cheaply as that share of first tokens comes within `slo_ttft_s`. What else can be said of
        replicas a ServeSpec says."""
        if isinstance(model, ServeSpec):
            if name or options or replicas != (1, 1) or slo_ttft_s is not None or slo_target is not None:
                raise UsageError("a ServeSpec says all of it itself.", hint="Give it what else you asked for.")
            spec = model
        else:
            fields = {"name": name or Path(model).name.lower(), "model": str(model), **options}
            slo = {"slo_ttft_s": slo_ttft_s, "slo_target": slo_target}
            fields["replicas"] = {"min": replicas[0], "max": replicas[1], **slo}
            spec = ServeSpec.parse(fields, where="serve")
        return EndpointHandle(self.client, self.client.serve(spec))

    def endpoint(self, name: str) -> EndpointHandle:
        return EndpointHandle(self.client, self.client.endpoint(name))

    @contextmanager
    def gang(
        self,
        members: int = 1,
        *,
        resources: Mapping[str, float] | None = None,
        labels: Mapping[str, str] | None = None,
        name: str = "gang",
        team: str | None = None,
        timeout_s: float = 600.0,
        **job: object,
    ) -> Iterator[Gang]:
        """Hold a gang for any Ray code in this process; it goes through the queue like every other job (see `train`).

        The lease ends with the block, or ten seconds after this process stops asking for it.
        """
        from raytide.actors.gang import Gang

        shape = Shape(members=members, resources=dict(resources or {"CPU": 1.0}), labels=dict(labels or {}))
        view = self._submit(JobKind.GANG, name, team, GangSpec(shapes=(shape,)), {}, job)
        with Gang(self.client, view.job.id, timeout_s=timeout_s) as gang:
            yield gang

    def task(
        self,
        *,
        resources: Mapping[str, float] | None = None,
        labels: Mapping[str, str] | None = None,
        name: str = "",
        team: str | None = None,
        timeout_s: float = 600.0,
        retries: int = 3,
        **job: object,
    ) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """A decorator: each call of the function waits in the queue, runs on a leased node, and returns its result.

        This process, on a machine of the cluster, is its driver, as in `gang`; Ray is entered when it was not. A lost
        node costs one of `retries`; what the function raises, none.
        """
        from raytide.sdk.task_call import call

        def leased(work: Callable[P, T]) -> Callable[P, T]:
            @wraps(work)
            def run(*args: P.args, **kwargs: P.kwargs) -> T:
                named = name or work.__name__
                if is_without_ray():
                    use_ray_at(self.status().ray_environment)
                with self.gang(
                    1, resources=resources, labels=labels, name=named, team=team, timeout_s=timeout_s, **job
                ) as gang:
                    return call(gang, retries, work, *args, **kwargs)

            return run

        return leased

    def scaling_config(
        self,
        workers: int | tuple[int, int] = 1,
        *,
        gpus_per_worker: float = 0.0,
        cpus_per_worker: float | None = None,
        selector: Mapping[str, str] | None = None,
        together: str = "",
        name: str = "ray-train",
        team: str | None = None,
        timeout_s: float = 30 * 86_400.0,
        **job: object,
    ) -> ScalingConfig:
        """For a trainer of Ray Train: its `fit()` waits in the queue and runs its workers inside the lease.

        `TorchTrainer(loop, scaling_config=tide.scaling_config(workers=4, gpus_per_worker=1))`; `workers=(2, 4)` is
        elastic. A worker takes one CPU where nothing is said. `selector`, `together`: see `Shape`; `job` as in `train`.
        """
        from raytide.actors.gang import Gang
        from raytide.actors.gang.ray_train import scaling

        each = shape(gpus=gpus_per_worker, cpus=cpus_per_worker, nodes=workers, selector=selector)
        gang = GangSpec(shapes=(each.model_copy(update={"together": together}),))

        def hold() -> Gang:
            view = self._submit(JobKind.GANG, name, team, gang, {}, job)
            return Gang(self.client, view.job.id, timeout_s=timeout_s)

        return scaling(hold, self.client, workers, dict(each.resources))

    def close(self) -> None:
        self.client.close()
        if self._on_exit is not None:
            self._on_exit()
            self._on_exit = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.client.address})"

    def _repr_html_(self) -> str:
        from raytide.core.io.notebook import table

        status = self.status()
        rows = [(node.id, node.type, str(node.market), node.zone, str(node.state)) for node in status.nodes]
        return table(f"cluster {status.name}", ("node", "type", "market", "zone", "state"), rows)

    def _submit(
        self,
        kind: JobKind,
        name: str,
        team: str | None,
        gang: GangSpec,
        config: dict[str, object],
        options: Mapping[str, object],
    ) -> JobView:
        whose = {} if team is None else {"team": team}
        fields = {"kind": kind, "name": name, **whose, "gang": gang, "config": config, **options}
        return self.client.submit(JobSpec.parse(fields, where=name))


def connect(cluster: str | None = None) -> Client:
    """The cluster of that name on this machine, or the one that RAYTIDE_API and RAYTIDE_TOKEN name.

    Also for drivers under `ray job submit`, which run on the head of the cluster.
    """
    return Client(ApiClient.find(cluster))


def local(config: str | Path | None = None, *, name: str = "local") -> Client:
    """Start an embedded cluster on this machine. Leaving the `with` block ends it, and so do `.close()` and the end of
    this process.
    """
    from raytide.control.bootstrap import local as cluster
    from raytide.core.io.process import Process

    started = cluster.up(config, name=name, owner=Process.of(os.getpid()))
    return Client(ApiClient.from_run_dir(started.run_dir), on_exit=lambda: cluster.down(name))


def _team_of(spec: TrainSpec | DataSpec) -> str | None:
    """None where nothing was said: the token's own."""
    return spec.team if "team" in spec.model_fields_set else None


def _parse(cls: type[_Spec], source: SpecSource) -> _Spec:
    if isinstance(source, str | Path):
        return cls.parse(load_yaml(source), where=str(source))
    return cls.parse(source, where=cls.__name__)
