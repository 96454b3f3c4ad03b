"""The whole simulation on small traces: what is counted, what is refused, and that nothing depends on chance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raytide.cli.app import app
from raytide.core.errors import DataError, UsageError
from raytide.core.objects.node import CapacityType
from raytide.simulate.serving.compare import Scenario
from raytide.simulate.serving.plot import page
from raytide.simulate.serving.setup import ServingSetup

POLICIES = ("raytide", "serve-ondemand", "spot-naive", "spothedge-1")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_costs_what_its_node_hours_cost_and_never_less_than_the_bound(
    setup: ServingSetup, policy: str
) -> None:
    stage = Scenario.of(setup)
    result = stage.run(policy)
    hours = result.node_hours
    assert result.cost_usd == pytest.approx(hours[CapacityType.ON_DEMAND] * 3.06 + hours[CapacityType.SPOT] * 0.918)
    if result.slo_attainment > 0.9:
        assert result.cost_usd > stage.lower_bound_usd() > 0
    assert 0 <= result.slo_attainment <= 1 and result.ttft_p50_s <= result.ttft_p99_s
    most = max(sample.ondemand + sample.spot for sample in result.samples)
    assert most <= 2 * setup.max_replicas + 4  # those that finish what they were sent, and SpotHedge's spare ones
    assert all(sample.spot <= 4 * 2 for sample in result.samples)


def test_the_same_seed_gives_the_same_week_and_another_one_another(setup: ServingSetup) -> None:
    def played(seed: int) -> dict[str, object]:
        return Scenario.of(setup.model_copy(update={"seed": seed})).run("raytide").to_json()

    assert played(1) == played(1)
    assert played(1) != played(2)


def test_on_demand_alone_never_uses_spot_and_spot_alone_never_buys_on_demand(setup: ServingSetup) -> None:
    stage = Scenario.of(setup)
    assert stage.run("serve-ondemand").node_hours[CapacityType.SPOT] == 0
    assert stage.run("spot-naive").node_hours[CapacityType.ON_DEMAND] == 0


def test_the_static_fleet_is_the_smallest_that_attains_99_percent(setup: ServingSetup) -> None:
    longer = setup.model_copy(update={"days": 0.4})  # so that the first start does not decide
    chosen = Scenario.of(longer).run("static")
    replicas = chosen.node_hours[CapacityType.ON_DEMAND] / 24 / longer.days
    assert chosen.slo_attainment >= 0.99 and replicas > 1
    fewer = longer.model_copy(update={"max_replicas": round(replicas) - 1})
    assert Scenario.of(fewer).run("static").slo_attainment < 0.99


def test_a_higher_target_costs_raytide_more_and_serves_no_fewer_in_time(setup: ServingSetup) -> None:
    low, high = (
        Scenario.of(setup.model_copy(update={"slo_target": target})).run("raytide") for target in (0.5, 0.9999)
    )
    assert high.cost_usd > low.cost_usd
    assert high.slo_attainment >= low.slo_attainment


def test_a_notice_lets_a_node_finish_what_it_can(setup: ServingSetup) -> None:
    sudden = Scenario.of(setup).run("spot-naive")
    warned = Scenario.of(setup.model_copy(update={"notice_s": 120.0})).run("spot-naive")
    assert sudden.spot_nodes_lost > 0 and warned.spot_nodes_lost > 0
    assert warned.to_json() != sudden.to_json()


def test_the_page_names_every_policy_and_runs_no_script(setup: ServingSetup) -> None:
    results = [Scenario.of(setup).run(name) for name in ("serve-ondemand", "raytide")]
    text = page(results[1], results[:1], results[1:], 1.0)
    assert text.count("<svg") == 2 and "<script" not in text and "serve-ondemand" in text


def options(setup: ServingSetup, **changed: object) -> list[str]:
    values = {"requests": setup.requests, "spot": setup.spot, "collection": "c1", "days": 0.02, **changed}
    return ["simulate", "serving", *(text for key, value in values.items() for text in (f"--{key}", str(value)))]


def test_the_command_prints_what_it_was_given_and_what_came_of_it(setup: ServingSetup, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*options(setup, policy="spothedge-1"), "--json"])
    shown = json.loads(done.stdout)
    assert {name: shown[name] for name in ("policy", "depth", "peak_rps", "slo_ttft_s", "seed", "cold_start_s")} == {
        "policy": "spothedge-1", "depth": 4, "peak_rps": 6.0, "slo_ttft_s": 5.0, "seed": 0, "cold_start_s": 180.0,
    }  # fmt: skip
    assert shown["requests"] == str(setup.requests) and shown["spot"] == str(setup.spot)
    assert shown["node_hours"].keys() == {"on-demand", "spot"}
    assert shown.keys() >= {"cost_usd", "slo_attainment", "lower_bound_usd", "ttft_p50_s", "ttft_p99_s"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"policy": "spothedge-9"}, "there is no policy 'spothedge-9'. Choose"),
        ({"collection": "c9"}, "no spot trace of 'c9'. The collections are: c1, c2"),
        ({"gpu": "a100"}, "It has availability of k80 x 1, availability of v100 x 1."),
        ({"requests": "nowhere.csv"}, "cannot read nowhere.csv"),
        ({"depth": 0}, "depth"),
        ({"slo-target": 1.5}, "slo_target"),
        ({"kind": "both"}, "kind"),
        ({"plot": "nowhere/page.html"}, "there is no folder nowhere"),
    ],
)
def test_bad_input_is_named(setup: ServingSetup, changed: dict[str, object], said: str) -> None:
    error = CliRunner().invoke(app, options(setup, **changed)).exception
    assert isinstance(error, UsageError) and said in str(error)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("t_s,prompt_tokens\n0,1\n", "no column output_tokens"),
        ("t_s,prompt_tokens,output_tokens\n0,1,1\n1,x,1\n", "line 3: prompt_tokens is 'x'"),
        ("t_s,prompt_tokens,output_tokens\n1,1,1\n1,1,1\n", "all requests at one time"),
        ("t_s,prompt_tokens,output_tokens\n0,1,1\n2,1\n", "line 3: output_tokens is missing"),
        ("t_s,prompt_tokens,output_tokens\n", "no rows"),
    ],
)
def test_a_recording_that_cannot_be_read_says_where(setup: ServingSetup, text: str, said: str) -> None:
    setup.requests.write_text(text)
    with pytest.raises(DataError, match=said):
        Scenario.of(setup)
