"""Trainers that had to start on demand move to spot when that has paid back, on real raylets; no step is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from tests.actors.trainer.gang_processes import lines, samples
from tests.live.conftest import dataset, train_spec

import raytide as rt
from raytide.actors.trainer.data.order.shuffle import BatchSampler
from raytide.actors.trainer.data.token_dataset import TokenData
from raytide.autoscaler.providers.local.spot import set_stockouts
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.control.client import ApiClient
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.node import NodeState
from raytide.core.specs.train import TrainSpec

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]
__all__ = ["dataset", "train_spec"]

STEPS = 1_000_000
"""More than is ever done: who will soon be done is left alone."""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[LocalCluster]:
    """A spot node is like one on demand, and costs next to nothing, so that a move pays back in some eight minutes."""
    body = yaml.safe_load(local.DEFAULT_CONFIG.read_text())
    body["metadata"]["raytide"]["limits"] = {"moves_after_s": 1}
    body["metadata"]["raytide"]["node_types"]["cpu1.spot"]["price_usd_h"] = 0.001
    body["available_node_types"]["cpu1.spot"]["resources"] = {"CPU": 2}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(body))
    with local.temporary(tmp_path / "home", tmp_path / "cluster.yaml", "moves") as up:
        yield up


def test_gangs_work_on_demand_until_their_spot_nodes_are_ready_and_lose_no_step(
    own: LocalCluster,
    tmp_path: Path,
    train_spec: Callable[..., TrainSpec],
    eventually: Callable[..., None],
    say: Callable[[str], None],
) -> None:
    """A rigid gang goes with both its nodes in one stop; an elastic one goes on with the other member meanwhile."""

    def spec(name: str, min_members: int) -> TrainSpec:
        gang = GangSpec(shapes=(Shape(members=2, min_members=min_members, resources={"CPU": 2}),))
        made = train_spec(name=name, gang=gang, steps=STEPS, record_samples=True, export=False, snapshot_every=1000)
        return made.model_copy(update={"out": str(tmp_path / name), "checkpoint_every": 1000})

    set_stockouts(own.run_dir, [("cpu1.spot", "*")])
    specs = {"rigid": spec("rigid", 2), "elastic": spec("elastic", 1)}
    with rt.Client(ApiClient.from_run_dir(own.run_dir)) as tide:
        runs = {name: tide.train(each) for name, each in specs.items()}

        def types(name: str) -> list[str]:
            lease = runs[name].refresh().view.lease
            known = {node.id: node.type for node in tide.status().nodes}
            return [] if lease is None else [known.get(member.node_id, "") for member in lease.usable]

        def steps(name: str) -> int:
            return int(runs[name].refresh().progress.get("step", 0))

        for name in runs:
            eventually(lambda name=name: types(name) == ["cpu2", "cpu2"] and steps(name) > 0, within_s=240.0)
        set_stockouts(own.run_dir, ())
        for name in runs:
            eventually(lambda name=name: types(name) == ["cpu1.spot"] * 2, within_s=3600.0, every_s=2.0)
            moved = steps(name)
            eventually(lambda name=name, moved=moved: steps(name) > moved + 5, within_s=120.0)
            say(f"{name} is on spot at step {steps(name)}")
        eventually(lambda: {n.type for n in tide.status().nodes if n.state is NodeState.READY} == {"cpu1.spot"})
        for run in runs.values():
            run.stop()
            eventually(lambda run=run: run.refresh().view.job.is_final)
            assert run.progress["steps_lost"] == 0
        _check_plans([action for plan in tide.client.plans(limit=1000) for action in plan["actions"]], say)
    for each in specs.values():
        done, begun = [line["step"] for line in lines(each, "metrics.jsonl")], samples(each)
        sampler = BatchSampler(each.seed, TokenData(each.dataset, each.seq_len).n_sequences, each.global_batch)
        assert done == list(range(1, len(done) + 1))
        assert sorted(begun) in (done, [*done, len(done) + 1]), "the last may have been under way when it was stopped"
        assert {step: begun[step] for step in done} == {step: Counter(sampler.ids(step - 1).tolist()) for step in done}


def _check_plans(actions: list[dict[str, object]], say: Callable[[str], None]) -> None:
    """Each node on demand is drained after its replacement was bought; both say why, and what it costs."""
    bought: dict[str, str] = {}
    drained: list[str] = []
    for action in actions:
        if action["action"] == "launch" and str(action["subject"]).startswith("move "):
            bought[str(action["subject"]).removeprefix("move ")] = str(action["reason"])
            say(str(action["reason"]))
            assert action["node_type"] == "cpu1.spot"
            assert "the move costs $" in str(action["reason"])
        elif action["action"] == "drain" and action["kind"] == "notice" and action["node_id"] in bought:
            drained.append(str(action["node_id"]))
            assert "is ready for" in str(action["reason"]) or " fit on " in str(action["reason"])
    assert sorted(set(drained)) == sorted(bought) and len(bought) == 4
    assert sum("stops for about" in reason for reason in bought.values()) == 2
    assert sum("continues with 1 of 2 members meanwhile" in reason for reason in bought.values()) == 2
