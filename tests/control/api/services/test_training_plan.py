"""Submission of trainings: automatic fields are filled in, and what cannot fit is refused with a fix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.control.conftest import NoMachines

from raytide.control.api.auth import ANY_TEAM, Caller
from raytide.control.api.services.service import ApiService
from raytide.core.clock import VirtualClock
from raytide.core.errors import CapacityError, ConfigError
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.objects.gang import Lease, LeaseState, Member
from raytide.core.objects.job import Job, JobState
from raytide.core.objects.node import ACCELERATOR_LABEL, TYPE_LABEL, CapacityType, Node, NodeState
from raytide.core.specs.train import TrainSpec
from raytide.core.state import Changes, Store
from raytide.queue.lifecycle.submission import measured_run
from raytide.sizing.calibration import Corrections
from raytide.sizing.memory.estimate import Hardware, estimate
from raytide.sizing.search import automatic
from raytide.sizing.step_time import step_time

CLUSTER = Path(__file__).parents[4] / "cluster.yaml"
H100 = next(each for each in load_cluster(CLUSTER).node_types if each.name == "h100x8")
CALLER = Caller(user="ana", team="default")
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "eos_token_id": 0,
}
Submit = Callable[..., Job]


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1000.0)


@pytest.fixture
def service(tmp_path: Path, store: Store, clock: VirtualClock) -> ApiService:
    return ApiService(
        store=store,
        config=load_cluster(CLUSTER),
        bill=NoMachines(),
        drivers=None,  # type: ignore[arg-type]
        clock=clock,
        live=tmp_path / "live.json",
        serve_url="http://127.0.9.1:8000",
        ray_url="http://127.0.9.1:8265",
        ray_environment={},
    )


@pytest.fixture
def submit(service: ApiService) -> Submit:
    def submit(
        wanted: Mapping[str, object], /, caller: Caller = CALLER, key: str | None = None, **changes: object
    ) -> Job:
        fields = {"dataset": "s3://data/d", "out": "s3://data/o", "steps": 10, "precision": "bf16", "seq_len": 8192}
        config = {**fields, "model": {"config": LLAMA_8B}, **changes}
        spec = TrainSpec.parse(config, where="test")
        body = {"kind": "train", "name": "mine", "gang": wanted, "config": spec.model_dump(mode="json")}
        return service.jobs.submit(body, caller, key).job

    return submit


def test_a_training_that_cannot_fit_is_refused_with_the_cheapest_fix(submit: Submit) -> None:
    with pytest.raises(CapacityError, match="cannot fit: it needs at least") as error:
        submit({"gpus": "H100:1"})
    assert error.value.hint is not None
    assert "GPUs on each node" in error.value.hint
    assert submit({"gpus": "H100:8"}).spec.gang.shapes[0].members == 1


def test_automatic_fields_are_filled_in_before_the_job_is_queued(submit: Submit) -> None:
    job = submit({"cpus": 1}, layout="auto", gang="auto")
    spec = TrainSpec.parse(job.spec.config, where="stored")
    assert spec.auto == ()
    assert job.spec.gang == spec.gang
    assert all("GPU" in shape.resources and TYPE_LABEL in shape.labels for shape in job.spec.gang.shapes)


def test_an_automatic_layout_is_chosen_for_the_gang_that_was_asked_for(submit: Submit) -> None:
    job = submit({"gpus": "h100:8", "nodes": 2}, layout="auto", gang={"gpus": "h100:8", "nodes": 2})
    spec = TrainSpec.parse(job.spec.config, where="stored")
    assert spec.auto == ()
    assert spec.layout.sizes(16).world == 16
    assert job.spec.gang.shapes[0].labels == {ACCELERATOR_LABEL: "H100"}


def test_a_repeated_submission_is_the_same_job(submit: Submit) -> None:
    first = submit({"cpus": 1}, key="once", layout="auto", gang="auto")
    assert submit({"cpus": 1}, key="once", layout="auto", gang="auto").id == first.id


def test_auto_without_a_readable_model_is_refused_and_without_auto_accepted(submit: Submit) -> None:
    unknown = {"model": {"config": "s3://models/m"}}
    with pytest.raises(ConfigError, match="leaves layout to the planner, which cannot read"):
        submit({"gpus": "H100:1"}, layout="auto", **unknown)
    assert submit({"gpus": "H100:1"}, **unknown).id


def test_the_vocabulary_of_a_local_dataset_completes_the_model(submit: Submit, tmp_path: Path) -> None:
    from tests.actors.trainer.conftest import write_dataset

    data = write_dataset(tmp_path / "data")
    model = {name: value for name, value in LLAMA_8B.items() if name not in ("vocab_size", "eos_token_id")}
    anybody = Caller(user="ana", team=ANY_TEAM)  # sees files that only this user can read
    job = submit({"cpus": 1}, anybody, dataset=str(data), layout="auto", gang="auto", model={"config": model})
    assert TrainSpec.parse(job.spec.config, where="stored").auto == ()


def test_gpu_memory_of_a_shape_selects_node_types(submit: Submit) -> None:
    job = submit({"gpus": 8, "gpu_memory_gb": 60})
    assert job.spec.gang.shapes[0].labels[TYPE_LABEL] == "in(h100x8,h100x8.spot)"
    with pytest.raises(CapacityError, match="needs GPUs with 500 GB"):
        submit({"gpus": 8, "gpu_memory_gb": 500})


@pytest.fixture
def ran(submit: Submit, store: Store, clock: VirtualClock) -> Callable[..., Job]:
    """Submits a training of one node with 8 H100, and lets it succeed with what it reported."""

    def run(node_types: tuple[str, ...] = ("h100x8",), **progress: float) -> Job:
        job = submit({"gpus": "H100:8", "nodes": len(node_types)}, gang={"gpus": "H100:8", "nodes": len(node_types)})
        number = int(job.id.removeprefix("job-"))
        names = [f"node-{10 * number + index}" for index in range(len(node_types))]
        shape = job.spec.gang.shapes[0]
        members = tuple(Member(index, node_id=name) for index, name in enumerate(names))
        done = replace(job, state=JobState.SUCCEEDED, ended_at_s=clock.now_s())
        lease = Lease(f"lease-{number}", job.id, shape, LeaseState.RELEASED, members)
        nodes = tuple(
            Node(name, kind, "us-east-1a", CapacityType.ON_DEMAND, 1, NodeState.GONE, 0.0)
            for name, kind in zip(names, node_types, strict=True)
        )
        store.report(job.id, {"step": 200, **progress}, clock.now_s())
        store.commit(Changes(clock.now_s(), jobs=(done,), leases=(lease,), nodes=nodes))
        clock.advance(61.0)
        return store.job(job.id)

    return run


def test_trainings_that_succeeded_correct_the_planner(service: ApiService, ran: Callable[..., Job]) -> None:
    assert service.jobs.learned.current() == Corrections()
    job = ran(world=8.0, step_s=3.0)
    (name,) = service.jobs.learned.current().pace
    run = measured_run(job, H100, lambda spec, job: LLAMA_8B)
    assert run is not None
    assert name == run.device.name
    corrected = service.jobs.learned.current().apply(run.device)
    assert step_time(run.workload, run.strategy, corrected, 8).total == pytest.approx(3.0)
    ran(world=8.0, step_s=6.0)
    ran(world=8.0, step_s=6.0)
    slower = service.jobs.learned.current().apply(run.device)
    assert step_time(run.workload, run.strategy, slower, 8).total == pytest.approx(6.0), "the median of the three"


@pytest.mark.parametrize(("reported", "scale"), [(1.0, 1.2), (0.0, None)], ids=["measured", "not comparable"])
def test_the_memory_of_trainings_corrects_the_planner(
    service: ApiService, ran: Callable[..., Job], reported: float, scale: float | None
) -> None:
    run = measured_run(ran(world=8.0, step_s=3.0), H100, lambda spec, job: LLAMA_8B)
    assert run is not None and not service.jobs.learned.current().memory
    found = estimate(run.workload, run.strategy, Hardware(0.0, fragmentation=0.0, context_bytes=0.0))
    ran(world=8.0, step_s=3.0, peak_bytes=reported * (found.peak + 0.2 * found.terms["activations"]))
    learned = service.jobs.learned.current().memory.get(run.device.name)
    assert learned == (None if scale is None else pytest.approx(scale))


@pytest.mark.parametrize(
    ("node_types", "progress"),
    [
        (("h100x8",), {"world": 8.0}),
        (("h100x8",), {"world": 8.0, "step_s": 3.0, "step": 5.0}),
        (("h100x8",), {"world": 8.0, "step_s": 1e9}),
        (("h100x8",), {"world": -1.0, "step_s": 3.0}),
        (("h100x8", "h100x8.spot"), {"world": 16.0, "step_s": 3.0}),
        (("gone",), {"world": 8.0, "step_s": 3.0}),
    ],
)
def test_a_run_that_cannot_be_compared_corrects_nothing(
    service: ApiService, ran: Callable[..., Job], node_types: tuple[str, ...], progress: dict[str, float]
) -> None:
    ran(node_types, **progress)
    assert service.jobs.learned.current() == Corrections()


def test_an_automatic_layout_asks_the_planner_as_it_was_corrected(
    service: ApiService, submit: Submit, ran: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran(world=8.0, step_s=3.0)
    asked: list[Corrections] = []
    real = automatic.plans_on

    def plans_on(workload: Any, node_type: Any, device: Any, *rest: Any) -> Any:
        asked.append(device.pace)
        return real(workload, node_type, device, *rest)

    monkeypatch.setattr(automatic, "plans_on", plans_on)
    submit({"gpus": "h100:8"}, layout="auto", gang={"gpus": "h100:8"})
    assert set(asked) == set(service.jobs.learned.current().pace.values())
