"""The SDK's entry point: `rt.connect()` returns the Client of a cluster. Notebooks display the cluster's jobs and
endpoints as tables.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack

from raytide.control.client import ApiClient
from raytide.control.views import ClusterStatus, CostReport, CostTable, JobView, TeamView
from raytide.core.config import Config, load_yaml
from raytide.core.errors import UsageError
from raytide.core.io.html import ShownList, framed, table
from raytide.core.io.working_dir import pack
from raytide.core.money import format_usd
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.objects.gang import GangSpec
from raytide.core.objects.job import JobKind, JobSpec
from raytide.core.specs.data import DataSpec
from raytide.core.specs.script import ScriptSpec
from raytide.core.specs.train import TrainSpec
from raytide.ledger.report import By
from raytide.registry.rollout.canary import CanarySpec
from raytide.sdk.jobs.flow_run import FlowRun, submit_flow
from raytide.sdk.jobs.job_run import Run, listing
from raytide.sdk.jobs.script import command_of
from raytide.sdk.jobs.task import Task
from raytide.sdk.jobs.train_run import TrainRun, run_of
from raytide.sdk.options import GangOptions, NodeOptions, ServeOptions, gang_of, job_and_gang
from raytide.sdk.registry.datasets import DatasetRegistry
from raytide.sdk.registry.models import ModelRegistry, named_model
from raytide.sdk.registry.rollouts import rollout_of
from raytide.sdk.serving.batch import RETRIES, batch_command, batch_model
from raytide.sdk.serving.endpoint import EndpointHandle, endpoint_row
from raytide.workflows.spec import FlowSpec
from raytide.workflows.sweep.spec import Value

if TYPE_CHECKING:
    from ray.train import ScalingConfig

    from raytide.actors.gang import Gang

P = ParamSpec("P")
T = TypeVar("T")
_Spec = TypeVar("_Spec", bound=Config)
SpecSource = Mapping[str, object] | str | Path
"""A spec as a mapping, or the path of a YAML file that holds one."""


class Client:
    """The connection of one user to one cluster. A `with` block closes the connection at its end. If `rt.local()` has
    started the cluster, the cluster ends as well.

    `raytide.sdk.options` defines the keyword arguments of jobs. `raytide.core.objects.hardware.resources` explains the
    keywords for resources.
    """

    def __init__(self, client: ApiClient, *, on_exit: Callable[[], object] | None = None) -> None:
        self.client = client
        self._on_exit = on_exit
        self.models = ModelRegistry(client)
        self.datasets = DatasetRegistry(client)

    def status(self) -> ClusterStatus:
        """Returns the cluster's nodes with their prices, and the number of its jobs by state."""
        return self.client.status()

    def cost(self) -> CostReport:
        """Returns the cost by team, job, endpoint and node."""
        return self.client.cost()

    def costs(self, by: By = "team", *, since_s: float = 0.0) -> CostTable:
        """Returns the cost by team, project, job, model, node or day, including the cost of lost work.

        `since_s` is the start of the period, in seconds since the epoch.
        """
        return self.client.costs(by, since_s=since_s)

    def teams(self) -> list[TeamView]:
        """Returns the teams with their quotas, budgets and spending."""
        columns = ("team", "in use", "own", "available", "spent this month")
        return ShownList(self.client.teams(), "teams", columns, _team_row)

    def endpoints(self) -> list[EndpointHandle]:
        """Returns all endpoints."""
        found = [EndpointHandle(self.client, status) for status in self.client.endpoints()]
        return ShownList(
            found, "endpoints", ("endpoint", "state", "replicas", "in flight", "cost", "url"), endpoint_row
        )

    def jobs(self, *, limit: int = 100) -> list[Run]:
        """Returns the latest jobs, newest first."""
        return listing(run_of(self.client, view) for view in self.client.jobs(limit=limit))

    def job(self, job_id: str) -> Run:
        """Returns the job with this id."""
        return run_of(self.client, self.client.job(job_id))

    def data(self, spec: DataSpec | SpecSource, **options: Unpack[GangOptions]) -> Run:
        """Submits a job that builds a token dataset on a leased node. Keywords for resources replace the spec's
        `gang`.
        """
        data = spec if isinstance(spec, DataSpec) else _parse(DataSpec, spec)
        job, gang = job_and_gang(options)
        if gang is not None:
            data = data.model_copy(update={"gang": gang_of(gang, where="data")})
        named = {"name": data.name, **_team_of(data), **job}
        return Run(self.client, self._submit(JobKind.DATA, data.gang, data.model_dump(mode="json"), named))

    def train(
        self,
        spec: TrainSpec | SpecSource,
        *,
        pip: Sequence[str] = (),
        image: str | None = None,
        **options: Unpack[GangOptions],
    ) -> TrainRun:
        """Submits a training, which survives the loss of gang members.

        Keywords for resources replace the spec's `gang`. `pip` replaces the spec's packages, and `image` replaces
        the spec's container image.
        """
        train = spec if isinstance(spec, TrainSpec) else _parse(TrainSpec, spec)
        if pip or image is not None:
            given = train.model_dump(mode="json", exclude_unset=True)  # a default team must not become a named one
            fields = {**given, "pip": list(pip), "image": image}
            train = TrainSpec.parse(fields, where="train")
        job, gang = job_and_gang(options)
        if gang is not None:
            auto = tuple(name for name in train.auto if name != "gang")
            train = train.model_copy(update={"gang": gang_of(gang, where="train"), "auto": auto})
        named = {"name": train.name, **_team_of(train), **job}
        return TrainRun(self.client, self._submit(JobKind.TRAIN, train.asks, train.model_dump(mode="json"), named))

    def run(
        self,
        script: str | Path,
        *args: str,
        working_dir: str | Path = ".",
        exclude: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        pip: Sequence[str] = (),
        image: str | None = None,
        nproc_per_node: int | str = 1,
        retries: int = 0,
        **options: Unpack[GangOptions],
    ) -> Run:
        """Submits a script that runs on every node of a gang. The environment has RANK, WORLD_SIZE and MASTER_ADDR, as
        torchrun sets them.

        The working directory is uploaded, except files that match `exclude`. After a failure the script is restarted,
        at most `retries` times. `pip` names packages that the script needs in addition to raytide's. `image` is a
        container image that replaces raytide's own environment.
        """
        folder = Path(working_dir)
        fields = {
            "command": command_of(str(script), args, folder),
            "env": dict(env or {}),
            "pip": tuple(pip),
            "image": image,
            "nproc_per_node": nproc_per_node,
            "retries": retries,
        }
        spec = ScriptSpec.parse(fields, where="run")
        job, gang = job_and_gang(options)
        wanted = gang_of(gang, where="run")
        config = {**spec.model_dump(mode="json"), "package": self.client.upload(pack(folder, tuple(exclude)))}
        return Run(self.client, self._submit(JobKind.SCRIPT, wanted, config, {"name": Path(script).stem, **job}))

    def flow(
        self,
        flow: FlowSpec | SpecSource,
        *,
        params: Mapping[str, Value] | None = None,
        working_dir: str | Path | None = None,
    ) -> FlowRun:
        """Submits a workflow. Its driver runs on the cluster until all stages are done.

        `params` override the parameters in the workflow's file. The working directory is uploaded for script stages. By
        default it is the file's folder.
        """
        return submit_flow(self.client, flow, params, working_dir)

    def batch(
        self,
        source: str | Path,
        out: str | Path,
        *,
        model: str,
        engine: Mapping[str, object] | None = None,
        **options: Unpack[GangOptions],
    ) -> Run:
        """Submits a job that answers the rows of a batch file, in order, on an engine of its own.

        The rows have the format of OpenAI's batches. `model` is a directory, a registered model or an endpoint's name.
        `engine` contains the engine's options. By default the job has a low priority and is preemptible. A job that was
        stopped continues where it stopped. `source` and `out` must be on storage that all nodes can read.
        """
        queue: GangOptions = {"name": Path(source).stem, "priority": "low", "preemptible": True, **options}
        job, gang = job_and_gang(queue)
        wanted = gang_of(gang, where="batch")
        spec = batch_model(self.client, model, engine or {}, wanted)
        script = ScriptSpec.parse({"command": batch_command(source, out, spec), "retries": RETRIES}, where="batch")
        return Run(self.client, self._submit(JobKind.SCRIPT, wanted, script.model_dump(mode="json"), job))

    def serve(
        self,
        model: str | Path | ServeSpec,
        *,
        name: str = "",
        replicas: int | tuple[int, int] = 1,
        slo_ttft_s: float | None = None,
        slo_target: float | None = None,
        canary: bool | Mapping[str, Any] | CanarySpec = False,
        shadow: float | None = None,
        ab: float | Mapping[str, Any] | None = None,
        why: str = "",
        **options: Unpack[ServeOptions],
    ) -> EndpointHandle:
        """Serves a Hugging Face model directory or a registered model over the OpenAI API. Returns the endpoint.

        - With `replicas=(1, 8)` the number of replicas follows the load. `slo_target` is the share of requests that
          must get a first token within `slo_ttft_s`. If it is given, the endpoint gets the cheapest number of replicas
          that reaches this share.
        - With `canary`, `shadow` or `ab` the model becomes a challenger of the model that the endpoint already serves.
          `EndpointHandle.rollout` shows the progress. `shadow` and `ab` are percentages.
        - `ab={"metric": "accepted", "test": {"effect": 0.05}}` compares the means of your own metric instead of users'
          thumbs.

        A ServeSpec has all other options.
        """
        rollout = rollout_of(canary, shadow, ab)
        if isinstance(model, ServeSpec):
            if name or options or replicas != 1 or slo_ttft_s is not None or slo_target is not None:
                raise UsageError("options cannot be combined with a ServeSpec.", hint="Set them in the ServeSpec.")
            return self._serve(model, rollout, why)
        least, most = (replicas, replicas) if isinstance(replicas, int) else replicas
        slo = {"slo_ttft_s": slo_ttft_s, "slo_target": slo_target}
        fields = {
            **named_model(str(model), name),
            "replicas": {"min": least, "max": most, **slo},
            **{key: value for key, value in options.items() if value is not None},
        }
        return self._serve(ServeSpec.parse(fields, where="serve"), rollout, why)

    def _serve(self, spec: ServeSpec, rollout: Mapping[str, Any] | None, why: str) -> EndpointHandle:
        if rollout is None:
            return EndpointHandle(self.client, self.client.serve(spec))
        self.client.start_rollout(spec, rollout, why)
        return self.endpoint(spec.name)

    def endpoint(self, name: str) -> EndpointHandle:
        """Returns the endpoint with this name."""
        return EndpointHandle(self.client, self.client.endpoint(name))

    @contextmanager
    def gang(self, *, timeout_s: float = 600.0, **options: Unpack[GangOptions]) -> Iterator[Gang]:
        """Opens a context that holds leased nodes for any Ray code in this process. The gang is a job in the queue.

        The lease ends with the context. The lease also ends once ten seconds have passed without a poll from this
        process.
        """
        with self.submit_gang(options, timeout_s) as gang:
            yield gang

    def task(
        self, *, timeout_s: float = 600.0, retries: int = 3, **options: Unpack[NodeOptions]
    ) -> Callable[[Callable[P, T]], Task[P, T]]:
        """Returns a decorator that turns each call of a function into a job, which waits in the queue and runs on a
        leased node.

        `f(x)` blocks and returns the result. `f.remote(x)` returns a future. `f.map(xs)` returns a future for each item
        of `xs`. This process is the driver, and must run on a machine of the cluster. If the node is lost, the call is
        repeated, at most `retries` times. An exception of the function is raised without a retry.
        """
        return lambda work: client_task(lambda: self, work, timeout_s, retries, options)

    def scaling_config(self, *, timeout_s: float = 30 * 86_400.0, **options: Unpack[GangOptions]) -> ScalingConfig:
        """Returns a ScalingConfig for Ray Train. With it, `fit()` waits in raytide's queue and runs in the lease.

        `TorchTrainer(loop, scaling_config=rt.scaling_config(nodes=4, gpus=1))` has four workers with one GPU each.
        `nodes=(2, 4)` makes the number of workers elastic.
        """
        from raytide.actors.gang.ray_train import scaling

        named: GangOptions = {"name": "ray-train", **options}
        shape = gang_of(job_and_gang(named)[1], where="scaling_config").shapes[0]
        workers = shape.members if shape.at_least == shape.members else (shape.at_least, shape.members)
        return scaling(lambda: self.submit_gang(named, timeout_s), self.client, workers, dict(shape.resources))

    def submit_gang(self, options: GangOptions | NodeOptions, timeout_s: float) -> Gang:
        """Queues a gang and returns it. A `with` block over the gang begins by waiting for the gang's lease, for at
        most `timeout_s` seconds.
        """
        from raytide.actors.gang import Gang

        job, gang = job_and_gang(options)
        view = self._submit(JobKind.GANG, gang_of(gang, where="gang"), {}, {"name": "gang", **job})
        return Gang(self.client, view.job.id, timeout_s=timeout_s)

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
        status = self.status()
        rows = [(node.id, node.type, str(node.market), node.zone, str(node.state)) for node in status.nodes]
        return framed(table(f"cluster {status.name}", ("node", "type", "market", "zone", "state"), rows))

    def _submit(
        self, kind: JobKind, gang: GangSpec, config: Mapping[str, object], options: Mapping[str, object]
    ) -> JobView:
        fields = {"kind": kind, "gang": gang, "config": dict(config), **options}
        return self.client.submit(JobSpec.parse(fields, where=str(options["name"])))


def client_task(
    client: Callable[[], Client], work: Callable[P, T], timeout_s: float, retries: int, options: NodeOptions
) -> Task[P, T]:
    """Returns a Task that runs the function `work` as jobs. Each call of the task gets its client from `client()`."""

    def hold(name: str) -> Gang:
        named: NodeOptions = {"name": name, **options}
        return client().submit_gang(named, timeout_s)

    return Task(work, hold, lambda: client().status().ray_environment, retries)


def connect(cluster: str | None = None) -> Client:
    """Returns a client of a cluster.

    If `cluster` is None and both RAYTIDE_API and RAYTIDE_TOKEN are set, the client connects to the address in
    RAYTIDE_API with this token. Otherwise the client connects to the cluster `cluster` on this machine.

    `connect` also works in drivers of `ray job submit`, which run on the head node.
    """
    return Client(ApiClient.find(cluster))


def local(config: str | Path | None = None, *, name: str = "local") -> Client:
    """Starts a cluster on this machine and returns its client.

    The cluster ends when the client's `with` block ends, when its `close` is called, or when this process ends.
    """
    from raytide.control.bootstrap.local import down, up
    from raytide.core.io.process import Process

    started = up(config, name=name, owner=Process.of(os.getpid()))
    return Client(ApiClient.from_run_dir(started.run_dir), on_exit=lambda: down(name))


def _team_row(team: TeamView) -> tuple[object, ...]:
    return team.name, team.use.used, team.use.own, team.use.available, format_usd(team.spent_micro_usd)


def _team_of(spec: TrainSpec | DataSpec) -> dict[str, str]:
    """Returns the spec's team as a field; empty if it names none, so that the API uses the token's team."""
    return {"team": spec.team} if "team" in spec.model_fields_set else {}


def _parse(cls: type[_Spec], source: SpecSource) -> _Spec:
    if isinstance(source, str | Path):
        return cls.parse(load_yaml(source), where=str(source))
    return cls.parse(source, where=cls.__name__)
