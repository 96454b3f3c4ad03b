"""An endpoint that had to start on demand moves to spot once there is some, on real raylets; no request notices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

import raytide as rt
from raytide.autoscaler.providers.local.spot import set_stockouts
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.control.client import ApiClient
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.objects.node import NodeState

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]


@pytest.fixture
def restless(tmp_path: Path) -> Iterator[LocalCluster]:
    """Its replicas may move as soon as they are seated."""
    body = yaml.safe_load(local.DEFAULT_CONFIG.read_text())
    body["metadata"]["raytide"]["limits"] = {"moves_after_s": 1}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(body))
    with local.temporary(tmp_path / "home", tmp_path / "cluster.yaml", "restless") as up:
        yield up


def test_on_demand_serves_until_its_spot_replacement_does(
    restless: LocalCluster, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    spec = ServeSpec(name="moves", model=str(tmp_path), engine={"kind": "fake", "tokens_per_s": 50.0})
    set_stockouts(restless.run_dir, [("cpu1.spot", "*")])
    with rt.Client(ApiClient.from_run_dir(restless.run_dir)) as tide:
        handle = tide.serve(spec).wait(replicas=1, timeout_s=180.0)

        def types() -> list[str]:
            return [node.type for node in tide.status().nodes if node.state is not NodeState.TERMINATING]

        assert types() == ["cpu2"]
        answers, errors, is_over = 0, [], threading.Event()

        def ask() -> None:
            nonlocal answers
            client = handle.openai(max_retries=0, timeout=30.0)
            while not is_over.is_set():
                try:
                    client.completions.create(model="moves", prompt="a b c", max_tokens=8)
                    answers += 1
                except Exception as error:  # whatever it is, it is what the test is about
                    errors.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            set_stockouts(restless.run_dir, ())
            eventually(lambda: "cpu1.spot" in types(), within_s=180.0)
            eventually(lambda: types() == ["cpu1.spot"], within_s=180.0)
            before = answers
            eventually(lambda: answers > before + 3)
        finally:
            is_over.set()
            asking.join()
        assert errors == []
        said = [action for plan in tide.client.plans(limit=500) for action in plan["actions"]]
        move = next(a for a in said if a["action"] == "launch" and a["subject"].startswith("move "))
        drain = next(a for a in said if a["action"] == "drain" and a["kind"] == "notice")
        assert (move["subject"], move["node_type"]) == (f"move {drain['node_id']}", "cpu1.spot")
        assert drain["cost_micro_usd_h"] == -83_200
