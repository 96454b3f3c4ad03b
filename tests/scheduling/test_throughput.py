"""The cost of a unit of work on each node type."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.core.objects.node import ACCELERATOR_LABEL, NodeType
from raytide.scheduling.throughput import AcceleratorClasses, at_least_as_fast_as, cost_per_work

GPU = {"GPU": 1.0}


def gpu(name: str, accelerator: str = "", speed: float = 1.0, count: float = 1.0) -> NodeType:
    labels = {ACCELERATOR_LABEL: accelerator} if accelerator else {}
    return NodeType(name=name, resources={"GPU": count}, labels=labels, price_micro_usd_h=1, speed=speed)


L4, A100, H100 = gpu("l4", "L4"), gpu("a100", "A100", 3.0), gpu("h100", "H100", 6.0)


def test_until_something_was_measured_types_compare_as_their_speeds_say() -> None:
    kinds = AcceleratorClasses.of([L4, A100, H100], GPU)
    assert kinds.relative({}) == {"l4": 1.0, "a100": 3.0, "h100": 6.0}


def test_what_was_measured_counts_and_says_how_fast_the_others_are() -> None:
    kinds = AcceleratorClasses.of([L4, A100, H100], GPU)
    assert kinds.relative({"a100": 20.0}) == {"l4": 1.0, "a100": 3.0, "h100": 6.0}
    assert kinds.relative({"l4": 10.0, "a100": 20.0}) == {"l4": 1.0, "a100": 2.0, "h100": pytest.approx(4.9)}


def test_spot_and_on_demand_of_one_accelerator_never_differ_however_they_were_measured() -> None:
    kinds = AcceleratorClasses.of([gpu("a", "L4"), gpu("a.spot", "L4", count=8.0)], GPU)
    assert kinds.relative({"a": 10.0, "a.spot": 11.0}) == {}
    unnamed = AcceleratorClasses.of([gpu("b"), gpu("b.spot")], GPU)
    assert unnamed.relative({"b": 10.0, "b.spot": 20.0}) == {}


def test_types_that_do_nearly_alike_count_as_alike() -> None:
    assert AcceleratorClasses.of([L4, gpu("t4", "T4")], GPU).relative({"l4": 10.0, "t4": 10.4}) == {}


def test_the_speed_of_a_gpu_says_nothing_of_work_that_asks_for_none() -> None:
    cpu = NodeType(name="cpu", resources={"CPU": 8}, price_micro_usd_h=1)
    assert AcceleratorClasses.of([H100, cpu], {"CPU": 1.0}).relative({}) == {}
    assert AcceleratorClasses.of([H100, cpu.model_copy(update={"speed": 2.0})], {"CPU": 1.0}).relative({}) == {
        "h100": 1.0,
        "cpu": 2.0,
    }


def test_nothing_on_which_it_could_go_is_no_pace() -> None:
    assert AcceleratorClasses.of([], GPU).relative({"gone": 3.0}) == {}


def test_work_costs_what_an_hour_costs_by_what_is_done_in_it() -> None:
    paces = AcceleratorClasses.of([L4, H100], GPU).relative({})
    assert cost_per_work(12.0, "h100", paces) == 2.0
    assert cost_per_work(12.0, "h100", {}) == 12.0


def test_a_move_goes_where_work_goes_no_slower() -> None:
    paces = {"l4": 1.0, "a100": 3.0, "h100": 6.0}
    assert at_least_as_fast_as("a100", paces) == "in(a100,h100)"
    assert at_least_as_fast_as("a100", {}) == ""


@given(st.dictionaries(st.sampled_from(["l4", "a100", "h100"]), st.floats(1e-3, 1e3)), st.floats(1e-2, 1e2))
def test_the_unit_in_which_was_measured_changes_nothing(measured: dict[str, float], unit: float) -> None:
    kinds = AcceleratorClasses.of([L4, A100, H100], GPU)
    before = kinds.relative(measured)
    after = kinds.relative({name: rate * unit for name, rate in measured.items()})
    assert after == pytest.approx(before, abs=0.11)
    assert not before or min(before.values()) == 1.0
