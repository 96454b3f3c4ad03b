"""Alerts, orders and the history over the API: who may do what, what is refused, what goes into the audit log."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from tests.autoscaler.nodes.test_lifecycle import READY
from tests.control.api.test_tenancy import ANA, BOB, ROOT, client, clock
from tests.dashboards.alerts.alert_examples import message

from raytide.autoscaler.providers.hosts.quarantine import HostQuarantine, quarantine_folder
from raytide.control.api.auth import Caller
from raytide.core.clock import VirtualClock
from raytide.core.errors import NotFoundError
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.objects.hardware.host import HostsSection
from raytide.core.state import Changes, Store
from raytide.dashboards.alerts.service import MonitoringService
from raytide.dashboards.history.points import label_set
from raytide.dashboards.history.writer import FILE, HistoryWriter

__all__ = ["client", "clock"]

ORDER = {"id": "order-1234", "kind": "quarantine_node", "subject": "node-1", "reason": "it is sick"}


@pytest.fixture(autouse=True)
def nodes(store: Store) -> None:
    store.commit(Changes(1000.0, nodes=(READY,)))


def test_an_order_is_stored_once_and_audited(client: TestClient, store: Store) -> None:
    for _ in range(2):
        answer = client.post("/v1/orders", json=ORDER, headers=ROOT)
        assert answer.status_code == 200, answer.text
    (order,) = store.load().orders
    assert (order.id, order.user, order.done_at_s) == ("order-1234", "root", None)
    entries = store.tenancy.audit.entries(action="order.")
    assert [(each.actor, each.action, each.object) for each in entries] == [("root", "order.quarantine_node", "node-1")]
    assert client.post("/v1/orders", json={**ORDER, "kind": "replace_node"}, headers=ROOT).status_code == 409
    assert client.get("/v1/orders/order-1234", headers=ROOT).json()["reason"] == "it is sick"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({**ORDER, "subject": "node-99"}, 404),
        ({**ORDER, "kind": "explode_node"}, 400),
        ({**ORDER, "id": "x"}, 400),
        ({**ORDER, "replica": "abc"}, 400),
        ({"id": "order-5678", "kind": "restart_replica", "subject": "chat", "replica": "abc"}, 404),
    ],
)
def test_orders_that_name_nothing_are_refused(client: TestClient, body: dict[str, object], status: int) -> None:
    assert client.post("/v1/orders", json=body, headers=ROOT).status_code == status


def test_nodes_are_the_operator_s_and_replicas_their_team_s(client: TestClient, store: Store) -> None:
    assert client.post("/v1/orders", json=ORDER).status_code == 403
    store.save_endpoint(ServeSpec(name="chat", model="m", team="default"), "ana", 1000.0)
    restart = {"id": "order-5678", "kind": "restart_replica", "subject": "chat", "replica": "abc"}
    assert client.post("/v1/orders", json=restart, headers=BOB).status_code == 403
    assert client.post("/v1/orders", json=restart, headers=ANA).status_code == 200


def test_alertmanager_s_webhook_makes_alerts_that_everyone_of_the_team_sees(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text('{"monitoring": true}')
    assert client.post("/v1/alerts/webhook", json=message()).status_code == 403
    assert client.post("/v1/alerts/webhook", json={"version": "1"}, headers=ROOT).status_code == 400
    assert client.post("/v1/alerts/webhook", json=message(), headers=ROOT).json() == {"alerts": 1}
    hidden = message(labels={"alertname": "BudgetExhausted", "team": "research"})
    client.post("/v1/alerts/webhook", json=hidden, headers=ROOT)
    (alert,) = client.get("/v1/alerts").json()
    assert (alert["name"], alert["state"], alert["labels"]) == ("NodeSick", "firing", {"node": "node-1"})
    assert len(client.get("/v1/alerts", headers=BOB).json()) == 2
    assert [each["name"] for each in client.get("/v1/alerts/history", params={"name": "NodeSick"}).json()] == [
        "NodeSick"
    ]


def test_a_silence_and_a_test_are_the_operator_s_and_audited(client: TestClient, store: Store) -> None:
    silence = {"name": "NodeSick", "for_s": 60}
    assert client.post("/v1/alerts/silences", json=silence).status_code == 403
    assert client.post("/v1/alerts/silences", json=silence, headers=ROOT).json()["until_s"] == 1060.0
    assert [each["name"] for each in client.get("/v1/alerts/silences").json()] == ["NodeSick"]
    fired = client.post("/v1/alerts/test", json={"name": "NodeSick", "labels": {"node": "n"}}, headers=ROOT).json()
    assert (fired["state"], fired["labels"]["raytide_test"]) == ("firing", "true")
    (alert,) = client.get("/v1/alerts").json()
    assert alert["silenced"]
    assert client.post("/v1/alerts/test", json={"nane": "x"}, headers=ROOT).status_code == 400
    assert {each.action for each in store.tenancy.audit.entries()} == {"alert.silence", "alert.test"}


def test_the_end_of_an_action_goes_into_the_audit_log(client: TestClient, store: Store) -> None:
    note = {"alert": "NodeSick", "kind": "command", "object": "x", "key": "k", "state": "done", "outcome": "ok"}
    assert client.post("/v1/alerts/actions", json=note, headers=ROOT).status_code == 200
    assert client.post("/v1/alerts/actions", json=note).status_code == 403
    (entry,) = store.tenancy.audit.entries()
    assert (entry.action, entry.object, entry.detail["outcome"]) == ("alert.command", "x", "ok")
    assert store.tenancy.audit.verify().is_whole
    assert client.get("/v1/alerts/actions", headers=ROOT).json() == []


def test_the_history_answers_with_curves(client: TestClient, tmp_path: Path, clock: VirtualClock) -> None:
    history = HistoryWriter(tmp_path / FILE, low_bytes=0)
    for step in range(5):
        series = history.series("raytide_requests_total", label_set({"endpoint": "chat"}), True)
        history.write(940.0 + 15 * step, [(series, 30.0 * step)])
    query = {"metric": "raytide_requests", "since_s": 30, "step_s": 15, "rate": True, "endpoint": "chat"}
    (curve,) = client.get("/v1/history", params=query).json()["series"]
    assert curve == {"labels": {"endpoint": "chat"}, "points": [[970.0, 2.0], [985.0, 2.0], [1000.0, 2.0]]}
    assert client.get("/v1/history", params={**query, "endpoint": "other"}).json() == {"series": []}
    assert client.get("/v1/history/metrics").json() == ["raytide_requests_total"]
    for odd in ({"metric": "a b"}, {"metric": "a", "since_s": 1e6, "step_s": 1}, {"metric": "a", "quantile": 2}):
        assert client.get("/v1/history", params=odd).status_code == 400
    assert client.get("/v1/probes").json() == []


def test_an_own_machine_is_kept_out_of_use_and_released_by_name(store: Store, tmp_path: Path) -> None:
    clock = VirtualClock(1000.0)
    machines = [{"name": "rack-1", "address": "10.0.0.1", "node_type": "own"}]
    hosts = HostsSection.model_validate({"ssh": {"user": "ray"}, "machines": machines})
    service = MonitoringService(tmp_path, store, clock, hosts)
    root = Caller("root", "*")
    held = HostQuarantine(quarantine_folder(tmp_path), clock)

    def order(kind: str, host: str = "rack-1") -> str:
        body = {"id": "order-5678", "kind": kind, "subject": host, "reason": "its fan"}
        return service.order(body, root).outcome

    assert "gets no further node" in order("quarantine_node")
    assert [entry.describe().partition(" `")[0] for entry in held.all_held()] == [
        "host rack-1 is in quarantine until it is released: its fan."
    ]
    assert order("release_node") == "it may be a node again"
    assert held.all_held() == ()
    assert order("release_node") == "it was not in quarantine"
    for kind, host in (("replace_node", "rack-1"), ("release_node", "rack-2")):
        with pytest.raises(NotFoundError):
            order(kind, host)
