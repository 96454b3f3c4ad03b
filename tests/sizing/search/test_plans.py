"""Plans over the repository's own node types: they fit, they rank, and they name what binds."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from raytide.core.errors import CapacityError
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.node import ACCELERATOR_LABEL, TYPE_LABEL, NodeType
from raytide.core.specs.model import ModelSpec
from raytide.core.specs.parallelism import Parallelism
from raytide.core.specs.train import MemorySpec, TrainSpec
from raytide.queue.lifecycle.submission import select_gpu_memory
from raytide.sizing.devices import DEVICES, GB, device_of, find_device, gpu_memory_gb
from raytide.sizing.memory.estimate import estimate
from raytide.sizing.model_shape import MODELS, ModelShape
from raytide.sizing.search.automatic import fill_in
from raytide.sizing.search.fixes import check_training
from raytide.sizing.search.plans import (
    Objective,
    PlanSearch,
    SearchOptions,
    hardware_of,
    is_possible,
    layouts,
    search_plans,
)
from raytide.sizing.step_time import step_time
from raytide.sizing.workload import TrainWorkload

ROOT = Path(__file__).resolve().parents[3]
TYPES = load_cluster(ROOT / "cluster.yaml").node_types
H100 = next(each for each in TYPES if each.name == "h100x8")
L4 = next(each for each in TYPES if each.name == "l4")


@cache
def searched(model: str, objective: Objective = "cost", hours: float | None = None) -> PlanSearch:
    workload = TrainWorkload(MODELS[model], 8192, 128, 1000)
    return search_plans(workload, TYPES, SearchOptions(objective=objective, hours=hours))


def spec_of(**changes: object) -> TrainSpec:
    return TrainSpec.parse({"dataset": "d", "out": "o", "steps": 10, "precision": "bf16", **changes}, where="train")


@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3-70b"])
def test_every_plan_fits_and_they_are_ranked(model: str) -> None:
    plans = searched(model).plans
    assert [plan.usd for plan in plans] == sorted(plan.usd for plan in plans)
    for plan in plans:
        assert 0.1 < plan.memory_share <= 1.0
        assert plan.strategy.world == plan.nodes * plan.devices
        assert plan.nodes <= plan.node_type.max_nodes
        assert 0.15 < plan.step.mfu < 0.6
        assert sum(plan.step.parts.values()) == pytest.approx(plan.step.total)
        assert min(plan.step.parts.values()) >= 0
        assert sum(plan.memory.terms.values()) == pytest.approx(plan.memory.peak)
        assert plan.json()["usd"] == plan.usd


def test_by_time_the_fastest_comes_first_and_a_limit_of_hours_moves_slow_ones_back() -> None:
    fastest = searched("llama-3-8b", "time").plans
    assert fastest[0].hours == min(plan.hours for plan in fastest)
    limited = searched("llama-3-8b", "cost", fastest[0].hours * 1.01).plans
    assert limited[0].hours <= fastest[0].hours * 1.01


def test_nothing_fits_on_a_gpu_that_is_too_small_and_the_nearest_miss_says_so() -> None:
    found = search_plans(TrainWorkload(MODELS["llama-3-70b"], 8192, 128), [L4])
    assert not found.plans
    assert found.misses[0].memory_share > 1
    assert found.misses[0].binding.startswith("memory")


def test_an_unknown_gpu_is_listed_and_never_planned() -> None:
    odd = H100.model_copy(update={"name": "odd", "labels": {ACCELERATOR_LABEL: "TPU-V6"}})
    found = search_plans(TrainWorkload(MODELS["llama-3-8b"], 8192, 128), [odd])
    assert (found.plans, found.unknown) == ((), ("odd",))


def test_devices_are_found_by_their_labels() -> None:
    names = {"A100-40G": "A100-40G", "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 PCIe": "H100 PCIe", "L40S": "L40S"}
    for label, name in names.items():
        assert (found := find_device(label)) is not None
        assert found.name == name
    assert find_device("TPU") is None
    assert find_device("NVIDIA L40") is None, "no L4"
    assert gpu_memory_gb(L4) == 24
    declared = L4.model_copy(update={"gpu_memory_gb": 22.5, "network_gbps": 10.0})
    found = device_of(declared)
    assert found is not None
    assert (found.memory_gb, found.network) == (22.5, 1.25e9)


def test_layouts_are_those_that_the_trainer_accepts() -> None:
    workload = TrainWorkload(MODELS["llama-3-8b"], 8192, 128)
    found = list(layouts(workload, 64, 8))
    assert all(sizes.world == 64 and sizes.tensor <= 8 for sizes, _ in found)
    assert {sizes.tensor for sizes, _ in found} == {1, 2, 4, 8}
    odd = replace(MODELS["llama-3-8b"], heads=24, kv_heads=6, head_dim=128)
    assert not is_possible(replace(workload, model=odd), 16, 1, 1)
    assert not is_possible(replace(workload, precision="fp8"), 2, 1, 1)
    assert not is_possible(replace(workload, seq_len=8191), 2, 1, 1)


# GPU memory as a resource


def test_gpu_memory_becomes_a_selector_of_node_types() -> None:
    gang = GangSpec.parse({"gpus": 8, "nodes": 2, "gpu_memory_gb": 60}, where="gang")
    shape = select_gpu_memory(gang, TYPES, subject="job").shapes[0]
    assert (shape.labels[TYPE_LABEL], shape.gpu_memory_gb) == ("in(h100x8,h100x8.spot)", None)
    small = GangSpec.parse({"gpus": 1, "gpu_memory_gb": 20, "labels": {ACCELERATOR_LABEL: "L4"}}, where="gang")
    assert select_gpu_memory(small, TYPES, subject="job").shapes[0].labels[TYPE_LABEL] == "l4"
    plain = GangSpec.parse({"gpus": 1}, where="gang")
    assert select_gpu_memory(plain, TYPES, subject="job") is plain


def test_more_gpu_memory_than_there_is_is_refused() -> None:
    gang = GangSpec.parse({"gpus": 1, "gpu_memory_gb": 100}, where="gang")
    with pytest.raises(CapacityError, match="needs GPUs with 100 GB; the largest have 80 GB"):
        select_gpu_memory(gang, TYPES, subject="job mine")


# what cannot fit


def check(
    shape: Shape, model: ModelShape = MODELS["llama-3-8b"], types: tuple[NodeType, ...] = TYPES, **spec: object
) -> None:
    check_training(spec_of(**spec), model, [shape], types)


def shape_of(gpus: float, accelerator: str, nodes: int = 1) -> Shape:
    return Shape(members=nodes, resources={"GPU": gpus}, labels={ACCELERATOR_LABEL: accelerator})


def test_a_job_that_cannot_fit_is_refused_with_the_cheapest_fix() -> None:
    """8e9 parameters at 16 bytes are 128 GB: they never fit on one H100, and do on eight."""
    with pytest.raises(CapacityError, match=r"cannot fit: it needs at least 1\d\d\.\d GB on each of 1 GPUs") as error:
        check(shape_of(1, "H100"))
    assert error.value.hint is not None
    assert error.value.hint.startswith("Ask for 2 GPUs on each node (")
    check(shape_of(8, "H100"))


def test_the_fix_makes_it_fit_and_none_that_does_is_cheaper() -> None:
    from raytide.sizing.search.fixes import misfit, smallest

    device = DEVICES["H100"]
    spec = spec_of(seq_len=65536, model={"max_seq_len": 65536})
    workload = TrainWorkload.from_spec(spec, MODELS["llama-3-8b"])
    found = misfit(workload, smallest(spec, 8), H100, device, 8, TYPES)
    assert found is not None
    costs = [fix.cost for fix in found.fixes]
    assert costs == sorted(costs)
    assert found.fixes[0].text.startswith("Set memory.checkpointing")
    fixed = smallest(spec, 8).with_memory(checkpointing="full", loss_chunk=4096)
    favourable = replace(hardware_of(device), fragmentation=0.0, context_bytes=5e8)
    assert estimate(workload, fixed, favourable).peak < device.memory_gb * GB


def test_what_might_fit_is_not_refused() -> None:
    check(Shape(resources={"CPU": 4.0}))
    check(shape_of(1, "H100"), types=tuple(each.model_copy(update={"labels": {}}) for each in TYPES))
    with pytest.raises(CapacityError):
        check(shape_of(1, "H100"), MODELS["llama-3-70b"])
    check(shape_of(8, "H100", nodes=4), MODELS["llama-3-70b"])
    check(shape_of(1, "H100"), finetune={"lora": {"rank": 8}}, init_from="x", memory={"checkpointing": "full"})


# auto


def test_auto_is_a_word_of_specs_that_survives_a_round_trip() -> None:
    spec = spec_of(layout="auto", gang="auto")
    assert spec.auto == ("layout", "gang")
    assert TrainSpec.parse(spec.model_dump(mode="json"), where="again") == spec
    assert spec_of().auto == ()


def test_an_automatic_gang_lists_node_types_on_which_its_layout_fits() -> None:
    spec = spec_of(layout="auto", gang="auto", seq_len=8192, global_batch=64, model={"max_seq_len": 8192})
    filled = fill_in(spec, MODELS["llama-3-8b"], TYPES)
    assert filled.auto == ()
    assert len(filled.gang.shapes) >= 2
    names = [shape.labels[TYPE_LABEL] for shape in filled.gang.shapes]
    assert len(set(names)) == len(names)
    for shape in filled.gang.shapes:
        check_training(filled, MODELS["llama-3-8b"], [shape], TYPES)
        filled.layout.sizes(shape.members * int(shape.resources["GPU"]))
        filled.layout.sizes(shape.at_least * int(shape.resources["GPU"]))
    assert TrainSpec.parse(filled.model_dump(mode="json"), where="filled") == filled


def test_an_automatic_layout_keeps_the_gang_and_an_automatic_gang_the_layout() -> None:
    gang = {"gpus": "H100:8", "nodes": 2}
    large = {"seq_len": 8192, "global_batch": 64, "model": {"max_seq_len": 8192}}
    by_layout = fill_in(spec_of(layout="auto", gang=gang, **large), MODELS["llama-3-8b"], TYPES)
    assert by_layout.gang == GangSpec.parse(gang, where="gang")
    assert by_layout.layout.sizes(16).world == 16
    layout = {"tensor": 4}
    by_gang = fill_in(spec_of(layout=layout, gang="auto", micro_batch=1, **large), MODELS["llama-3-8b"], TYPES)
    assert by_gang.layout == Parallelism(tensor=4)
    assert by_gang.memory == MemorySpec()


def test_auto_is_refused_where_nothing_fits() -> None:
    spec = spec_of(layout="auto", gang="auto", seq_len=8192, global_batch=64, model={"max_seq_len": 8192})
    with pytest.raises(CapacityError, match="no plan fits train: the nearest needs") as error:
        fill_in(spec, MODELS["llama-3-70b"], [L4])
    assert error.value.hint


def test_on_a_cluster_of_cpus_a_small_model_is_planned_on_them() -> None:
    types = load_cluster(ROOT / "platform/raytide/control/bootstrap/local.yaml").node_types
    model = replace(MODELS["llama-3-8b"], layers=2, width=64, heads=4, kv_heads=4, head_dim=16, ffn=176, vocab=512)
    spec = spec_of(layout="auto", gang="auto", precision="fp32", model=ModelSpec(dim=64).model_dump())
    filled = fill_in(spec, model, types)
    assert "CPU" in filled.gang.shapes[0].resources


def test_planning_imports_no_torch_and_no_ray() -> None:
    code = (
        "import sys; from raytide.sdk.plan import plan; plan('llama-3-8b', cluster_file=sys.argv[1]).best;"
        "assert not {'torch', 'ray', 'sqlalchemy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(ROOT / "cluster.yaml")], check=True, timeout=120)


def test_more_devices_are_never_slower_and_never_need_more_memory_each() -> None:
    workload = TrainWorkload(MODELS["llama-3-8b"], 8192, 128)
    device = DEVICES["H100"]
    seconds, peaks = [], []
    for world in (8, 16, 32, 64):
        found = [
            (step_time(workload, strategy, device, 8).total, estimate(workload, strategy, hardware_of(device)).peak)
            for sizes, layout in layouts(workload, world, 8)
            if sizes.shard == world and layout.zero == 3
            for strategy in [_strategy(sizes, layout)]
        ]
        seconds.append(found[0][0])
        peaks.append(found[0][1])
    assert seconds == sorted(seconds, reverse=True)
    assert peaks == sorted(peaks, reverse=True)


def _strategy(sizes: object, layout: Parallelism) -> object:
    from raytide.sizing.workload import Strategy

    return Strategy(sizes, layout, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields", [{"distill": {"teacher": "t"}}, {"memory": {"parameters": "cpu", "optimizer": "cpu"}}, {"qat": {}}]
)
@pytest.mark.parametrize("gang", ["auto", {"gpus": "H100:8", "nodes": 2}])
def test_an_automatic_layout_is_one_that_the_spec_may_have(fields: dict[str, object], gang: object) -> None:
    spec = spec_of(layout="auto", gang=gang, seq_len=8192, global_batch=64, model={"max_seq_len": 8192}, **fields)
    filled = fill_in(spec, MODELS["llama-3-8b"], TYPES)
    assert TrainSpec.parse(filled.model_dump(mode="json"), where="filled") == filled
