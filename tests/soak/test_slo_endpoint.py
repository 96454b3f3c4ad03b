"""An endpoint with an SLO on real raylets: its spot nodes are taken back, on demand serves, spot takes over again, and
as many requests are in time as were promised."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.soak.users import Clients

import raytide as rt
from raytide.autoscaler.providers.local.spot import reclaim, set_stockouts
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.control.client import ApiClient
from raytide.core.objects.endpoint import Replicas, ServeSpec, Speed
from raytide.core.objects.node import NodeState

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

SPEED = Speed(prefill_tps=1000.0, slots=8, tpot_ms=20.0)
SLOW = Speed(prefill_tps=1000.0, slots=4, tpot_ms=50.0)
SLO_S = 5.0
EXPLAINED = re.compile(
    r"99 % in time are asked, (none so far|(?P<attained>[\d.]+) % in the last week); of the (?P<all>\d+), "
    r"the usual rate needs (?P<busy>\d+), bursts (?P<bursts>\d+) more, lost nodes (?P<lost>\d+) more"
)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[LocalCluster]:
    with local.temporary(tmp_path / "home", local.DEFAULT_CONFIG, "slo") as running:
        yield running


def test_lost_spot_is_replaced_on_demand_and_takes_over_again_when_it_is_back(
    up: LocalCluster, tmp_path: Path, eventually: Callable[..., None], say: Callable[[str], None]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    replicas = Replicas(
        min=2, max=2, slo_ttft_s=2.0, slo_target=0.9, cold_start_s=20.0, speed={"cpu2": SPEED, "cpu1.spot": SPEED}
    )
    spec = ServeSpec(name="slo", model=str(tmp_path), engine={"kind": "fake", "tokens_per_s": 50.0}, replicas=replicas)
    with rt.Client(ApiClient.from_run_dir(up.run_dir)) as tide:
        handle = tide.serve(spec).wait(replicas=2, timeout_s=180.0)

        def nodes(state: NodeState = NodeState.READY) -> dict[str, str]:
            return {node.id: node.type for node in tide.status().nodes if node.state is state}

        def types() -> Counter[str]:
            return Counter(nodes().values())

        def explained() -> list[dict[str, object]]:
            return [action for plan in reversed(tide.client.plans(limit=500)) for action in plan["actions"]]

        with Asking(handle) as (answers, errors):
            eventually(lambda: types() == {"cpu1.spot": 2}, within_s=120.0)
            set_stockouts(up.run_dir, [("cpu1.spot", "*")])
            for node_id in nodes():
                reclaim(up.run_dir, node_id)
            eventually(lambda: types() == {"cpu2": 1}, within_s=180.0)
            eventually(lambda: handle.refresh().status.ready_replicas == 2, within_s=180.0)
            say(f"on demand after the loss: {len(answers)} answers, {len(errors)} errors")
            errors.clear()
            set_stockouts(up.run_dir, ())
            eventually(lambda: types()["cpu1.spot"] == 2, within_s=300.0)
            eventually(lambda: types() == {"cpu1.spot": 2}, within_s=300.0)
            before = len(answers)
            eventually(lambda: len(answers) > before + 3)
            assert errors == []
        assert handle.refresh().status.endpoint.target_replicas == 2
        said = explained()
        scales = [str(a["reason"]) for a in said if a["action"] == "scale"]
        assert any("2 replicas are worth the spot price, 2 the on-demand price" in reason for reason in scales)
        drains = [a for a in said if a["action"] == "drain" and a["kind"] == "notice"]
        assert len({a["node_id"] for a in drains}) == 1, drains  # a drain is said again until Ray knows of it
        assert all(str(a["reason"]).startswith("endpoint slo has 2 replicas without it; saves") for a in drains)
        for line in scales:
            say(line)


def test_a_storm_that_takes_the_fullest_zone_again_and_again_leaves_the_promised_share_in_time(
    up: LocalCluster, tmp_path: Path, eventually: Callable[..., None], say: Callable[[str], None]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    replicas = Replicas(
        min=1, max=4, slo_ttft_s=SLO_S, slo_target=0.99, cold_start_s=30.0, speed={"cpu2": SLOW, "cpu1.spot": SLOW}
    )
    engine = {"kind": "fake", "tokens_per_s": 1000.0 / SLOW.tpot_ms, "max_running": SLOW.slots}
    spec = ServeSpec(name="kept", model=str(tmp_path), engine=engine, replicas=replicas)
    with rt.Client(ApiClient.from_run_dir(up.run_dir)) as tide:
        handle = tide.serve(spec).wait(replicas=1, timeout_s=180.0)

        def spot() -> list[tuple[str, str]]:
            nodes = [node for node in tide.status().nodes if node.state is NodeState.READY]
            return [(node.zone, node.id) for node in nodes if node.type == "cpu1.spot"]

        def is_whole() -> bool:
            status = handle.refresh().status
            return bool(spot()) and status.ready_replicas >= max(2, status.endpoint.target_replicas)

        clients = Clients(handle.base_url, handle.name, seed=0, per_s=2.0)
        for _ in range(4):
            eventually(is_whole, within_s=300.0)
            there = spot()
            fullest = Counter(zone for zone, _ in there).most_common(1)[0][0]
            for zone, node_id in there:
                if zone == fullest:
                    reclaim(up.run_dir, node_id)
            answered = clients.ended["answered"]
            eventually(lambda answered=answered: clients.ended["answered"] >= answered + 250, within_s=600.0)
        assert clients.close(timeout_s=60.0) == 0
        in_time = sum(first_s <= SLO_S for first_s in clients.first_s)
        say(f"{clients.sent} sent, {in_time} in time; {dict(clients.ended)}")
        assert in_time >= 0.989 * clients.sent
        reasons = (str(a["reason"]) for plan in tide.client.plans(limit=500) for a in plan["actions"])
        explained = [found for reason in reasons if (found := EXPLAINED.search(reason))]
        for found in explained:
            say(found.group())
        attained = [float(found["attained"]) for found in explained if found["attained"]]
        assert attained
        assert attained[-1] >= 98.9
        assert all(int(found["all"]) == sum(map(int, found.group("busy", "bursts", "lost"))) for found in explained)
        assert any(int(found["bursts"]) + int(found["lost"]) > 0 for found in explained)


class Asking:
    """One request after another, beside what happens; answers and errors."""

    def __init__(self, handle: rt.EndpointHandle) -> None:
        self._handle, self._is_over = handle, threading.Event()
        self._answers: list[str] = []
        self._errors: list[Exception] = []
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> tuple[list[str], list[Exception]]:
        self._thread.start()
        return self._answers, self._errors

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _ask(self) -> None:
        client = self._handle.openai(max_retries=0, timeout=30.0)
        while not self._is_over.is_set():
            try:
                self._answers.append(client.completions.create(model="slo", prompt="a b c", max_tokens=8).id)
            except Exception as error:  # whatever it is, it is what the test is about
                self._errors.append(error)
