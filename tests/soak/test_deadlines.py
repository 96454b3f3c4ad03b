"""Jobs with a deadline on real raylets: one waits for spot, one has no time for it, and both say so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.live.conftest import dataset, train_spec

import raytide as rt
from raytide.autoscaler.providers.local.spot import set_stockouts
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.control.client import ApiClient
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.specs.train import TrainSpec

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]
__all__ = ["dataset", "train_spec"]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[LocalCluster]:
    with local.temporary(tmp_path / "home", local.DEFAULT_CONFIG, "deadlines") as up:
        yield up


def test_who_has_time_waits_for_spot_and_who_has_none_runs_on_demand(
    own: LocalCluster, tmp_path: Path, train_spec: Callable[..., TrainSpec], eventually: Callable[..., None]
) -> None:
    gang = GangSpec(shapes=(Shape(members=1, resources={"CPU": 1}),))
    set_stockouts(own.run_dir, [("cpu1.spot", "*")])
    with rt.Client(ApiClient.from_run_dir(own.run_dir)) as tide:
        calm = tide.train(train_spec(gang=gang, out=str(tmp_path / "calm")), deadline="6h", estimate_h=0.5)
        hasty = tide.train(train_spec(gang=gang, out=str(tmp_path / "hasty"), steps=2000), deadline=900, estimate_h=0.2)

        def bought() -> dict[str, set[str]]:
            actions = [action for plan in tide.client.plans(limit=500) for action in plan["actions"]]
            leases = {str(a["lease"]["id"]): str(a["job_id"]) for a in actions if a["action"] == "admit"}  # type: ignore[index]
            found: dict[str, set[str]] = {}
            for action in actions:
                if action["action"] == "launch" and (job := leases.get(str(action["subject"]))):
                    found.setdefault(job, set()).add(str(action["node_type"]))
            return found

        eventually(lambda: hasty.refresh().progress.get("step", 0) > 0, within_s=180.0)
        assert bought()[hasty.id] == {"cpu2"}
        assert "no time is left for another attempt on spot" in hasty.why()
        eventually(lambda: "left_s" in hasty.refresh().progress)
        eventually(lambda: "waits for spot: 0.5 h of work" in calm.why(), within_s=120.0)
        assert not calm.refresh().progress.get("step")
        set_stockouts(own.run_dir, ())
        calm.wait(timeout_s=600.0)
        assert "cpu1.spot" in bought()[calm.id] and "cpu2" not in bought()[calm.id]
        hasty.stop()
