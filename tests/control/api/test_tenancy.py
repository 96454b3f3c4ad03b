"""Keys, usage and the audit log over the API: who may see and do what, and what gateways are told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from tests.control.api.test_routes import GANG, LOCAL, Echo
from tests.control.conftest import NoMachines

from raytide.control.api.auth import JobTokens, Tokens
from raytide.control.api.routes import create_app
from raytide.control.api.services.endpoints import EndpointService
from raytide.control.api.services.service import ApiService
from raytide.control.api.services.tenancy import SILENCE_S
from raytide.control.job_tokens import token_of
from raytide.core.clock import VirtualClock
from raytide.core.objects.api_key import digest_of_secret
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.objects.team import TeamSpec
from raytide.core.state import Store

ANA, BOB, ROOT, GATEWAY = ({"Authorization": f"Bearer {name}"} for name in ("ana", "bob", "root", "gateway"))
TOKENS = {
    "ana": {"user": "ana", "team": "default"},
    "bob": {"user": "bob", "team": "research"},
    "root": {"user": "root", "team": "*"},
    "gateway": {"role": "gateway"},
}
ROW = {"id": "r1", "at_s": 1000.0, "key": "key-1", "team": "default", "model": "chat", "status": 200}


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1000.0)


@pytest.fixture
def client(tmp_path: Path, store: Store, clock: VirtualClock) -> Iterator[TestClient]:
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS))
    config = load_cluster(LOCAL)
    teams = {"default": TeamSpec(), "research": TeamSpec(weight=3.0)}
    settings = config.settings.model_copy(update={"teams": teams})
    service = ApiService(
        store=store,
        config=config.model_copy(update={"settings": settings}),
        bill=NoMachines(),
        drivers=Echo(),  # type: ignore[arg-type]
        clock=clock,
        live=tmp_path / "live.json",
        serve_url="",
        ray_url="",
        ray_environment={},
    )
    with TestClient(create_app(service, Tokens(tmp_path / "tokens.json", JobTokens(b"k" * 32, store)))) as client:
        client.headers.update(ANA)
        yield client


def create(client: TestClient, **spec: object) -> dict[str, object]:
    made: dict[str, object] = client.post("/v1/keys", json={"name": "web", **spec}).json()
    return made


def table(client: TestClient, newer_than: int = -1, timeout_s: float = 0.0) -> dict[str, object]:
    query = {"newer_than": newer_than, "timeout_s": timeout_s, "gateway": "g1"}
    found: dict[str, object] = client.get("/v1/gateway/keys", params=query, headers=GATEWAY).json()
    return found


class TestKeys:
    def test_the_secret_is_shown_once_and_kept_nowhere(self, client: TestClient, tmp_path: Path) -> None:
        made = create(client, budget={"usd": 2}, requests_per_min=60)
        secret = str(made["secret"])
        assert secret.startswith("rk-")
        assert made["key"]["user"] == "ana"  # type: ignore[index]
        assert list(table(client)["keys"]) == [digest_of_secret(secret)]  # type: ignore[call-overload]
        seen = [client.get(path, headers=ROOT).text for path in ("/v1/keys", "/v1/keys/key-1", "/v1/audit")]
        assert all(secret not in text for text in seen)
        assert all(secret.encode() not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())

    def test_members_see_and_change_the_keys_of_their_own_team(self, client: TestClient) -> None:
        create(client)
        assert client.post("/v1/keys", json={"name": "x", "team": "research"}).status_code == 403
        for method, path in (("GET", ""), ("POST", "/rotate"), ("POST", "/revoke")):
            assert client.request(method, f"/v1/keys/key-1{path}", headers=BOB).status_code == 403
        assert client.get("/v1/keys", headers=BOB).json() == []
        assert [view["key"]["id"] for view in client.get("/v1/keys", headers=ROOT).json()] == ["key-1"]
        assert client.post("/v1/keys/key-1/revoke", headers=ROOT).json()["key"]["revoked_at_s"] == 1000.0
        assert client.get("/v1/keys").json() == []
        assert len(client.get("/v1/keys", params={"ended": True}).json()) == 1
        assert client.post("/v1/keys", json={"name": "x", "team": "nobody"}, headers=ROOT).status_code == 400

    def test_only_operators_make_keys_that_go_before_others(self, client: TestClient) -> None:
        urgent = {"name": "x", "priority": -1}
        assert client.post("/v1/keys", json=urgent).status_code == 403
        assert client.post("/v1/keys", json=urgent, headers=ROOT).json()["key"]["priority"] == -1
        assert client.post("/v1/keys", json={"name": "x", "priority": 5}).status_code == 200

    def test_a_job_cannot_make_or_change_keys(self, client: TestClient) -> None:
        create(client)
        job = client.post("/v1/jobs", json=GANG).json()["job"]["id"]
        as_job = {"Authorization": f"Bearer {token_of(job, b'k' * 32)}"}
        for path in ("", "/key-1/rotate", "/key-1/revoke"):
            assert client.post(f"/v1/keys{path}", json={"name": "x"}, headers=as_job).status_code == 403

    def test_a_rotated_key_works_until_its_grace_is_over(self, client: TestClient) -> None:
        create(client)
        made = client.post("/v1/keys/key-1/rotate", params={"grace_s": 60}).json()
        assert made["key"]["account"] == "key-1"
        assert client.get("/v1/keys/key-1").json()["key"]["expires_at_s"] == 1060.0
        assert client.post("/v1/keys/key-1/rotate").status_code == 409

    def test_a_team_cannot_fill_the_store_with_keys(self, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("raytide.control.api.services.submission_rate.CHANGE_BYTES", 30 << 20)
        statuses = [client.post("/v1/keys", json={"name": "x"}).status_code for _ in range(2)]
        statuses += [client.post("/v1/keys/key-1/rotate").status_code, client.post("/v1/keys/key-1/revoke").status_code]
        assert statuses == [200, 200, 429, 200]


class TestGateways:
    def test_their_token_opens_their_routes_only_and_no_other_does(self, client: TestClient) -> None:
        for path in ("/v1/status", "/v1/keys", "/v1/audit", "/v1/jobs"):
            assert client.get(path, headers=GATEWAY).status_code == 403
        for headers in (ANA, ROOT):
            assert client.get("/v1/gateway/keys", headers=headers).status_code == 403
            assert client.post("/v1/gateway/usage", json={"gateway": "g"}, headers=headers).status_code == 403

    def test_they_do_not_wait_for_those_who_read_logs(
        self, client: TestClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reading, silent = threading.Semaphore(0), threading.Event()

        def logs(*_: object) -> bool:
            reading.release()
            return silent.wait(60)

        monkeypatch.setattr(EndpointService, "logs", logs)
        told: list[int] = []

        def tell() -> None:
            report = {"gateway": "g1", "counted": []}
            told.append(client.post("/v1/gateway/rollouts", json=report, headers=GATEWAY).status_code)

        readers = [threading.Thread(target=client.get, args=("/v1/endpoints/chat/logs",)) for _ in range(4)]
        gateway = threading.Thread(target=tell)
        for each in readers:
            each.start()
        try:
            assert all(reading.acquire(timeout=60) for _ in readers)
            gateway.start()
            gateway.join(50)
            assert told == [200]
        finally:
            silent.set()
            for each in (*readers, gateway):
                if each.ident is not None:
                    each.join(60)

    def test_they_are_told_of_a_revoked_key_while_they_wait(self, client: TestClient) -> None:
        create(client)
        before = table(client)
        assert (before["revision"], before["is_whole"]) == (1, True)
        told: list[dict[str, object]] = []
        waiting = threading.Thread(target=lambda: told.append(table(client, newer_than=1, timeout_s=30.0)))
        waiting.start()
        time.sleep(0.2)  # the poll waits by now, or finds the change at once
        client.post("/v1/keys/key-1/revoke")
        waiting.join(20)
        assert [key["revoked_at_s"] for key in told[0]["keys"].values()] == [1000.0]  # type: ignore[attr-defined]
        assert told[0]["is_whole"] is False

    def test_they_are_told_prices_and_weights_and_get_all_after_a_restore(self, client: TestClient) -> None:
        create(client)
        found = table(client, newer_than=77)  # of another store
        assert (found["is_whole"], len(found["keys"])) == (True, 1)  # type: ignore[arg-type]
        assert found["weights"] == {"default": 1.0, "research": 3.0}

    def test_budgets_are_reserved_and_requests_billed_once(self, client: TestClient) -> None:
        create(client, budget={"usd": 0.0001, "per": "life"})
        asked = {"gateway": "g1", "asked": [{"id": "r1", "key": "key-1", "amount_micro_usd": 80}]}
        assert client.post("/v1/gateway/reservations", json=asked, headers=GATEWAY).json() == {"r1": ""}
        assert client.get("/v1/keys/key-1").json()["spending"] == {"month": 0, "life": 0, "reserved": 80}
        batch = {"gateway": "g1", "requests": [{**ROW, "cost_pico_usd": 50_000_000}], "refused": 2}
        assert client.post("/v1/gateway/usage", json=batch, headers=GATEWAY).json() == {"new": 1}
        assert client.post("/v1/gateway/usage", json=batch, headers=GATEWAY).json() == {"new": 0}
        assert client.get("/v1/keys/key-1").json()["spending"] == {"month": 50, "life": 50, "reserved": 0}
        asked["asked"][0]["id"] = "r2"  # type: ignore[index]
        refused = client.post("/v1/gateway/reservations", json=asked, headers=GATEWAY).json()
        assert refused == {"r2": "insufficient_quota"}

    def test_a_silent_gateway_is_given_up_but_not_for_the_silence_of_the_api(
        self, client: TestClient, clock: VirtualClock
    ) -> None:
        create(client, budget={"usd": 0.0001})

        def reserve(gateway: str, id: str) -> str:
            asked = {"gateway": gateway, "asked": [{"id": id, "key": "key-1", "amount_micro_usd": 80}]}
            answer: dict[str, str] = client.post("/v1/gateway/reservations", json=asked, headers=GATEWAY).json()
            return answer[id]

        assert reserve("dead", "a") == ""
        clock.advance(SILENCE_S - 1)
        assert reserve("g1", "b") == "insufficient_quota"
        clock.advance(2)
        assert reserve("g1", "c") == ""

    def test_a_report_of_a_thousand_requests_fits(self, client: TestClient) -> None:
        create(client)
        rows = [{**ROW, "id": f"r{number}" + "x" * 40, "user": "u" * 60} for number in range(1000)]
        batch = {"gateway": "g1", "requests": rows, "released": [row["id"] for row in rows]}
        assert client.post("/v1/gateway/usage", json=batch, headers=GATEWAY).json() == {"new": 1000}
        batch["requests"] = [*rows, rows[0]]
        assert client.post("/v1/gateway/usage", json=batch, headers=GATEWAY).status_code == 400


class TestUsage:
    @pytest.fixture(autouse=True)
    def rows(self, client: TestClient) -> None:
        create(client)
        rows = [
            {**ROW, "cost_pico_usd": 3_000_000, "prompt_tokens": 5},
            {**ROW, "id": "r2", "status": 429},
            {**ROW, "id": "r3", "team": "research", "key": "key-2", "at_s": 2000.0},
        ]
        client.post("/v1/gateway/usage", json={"gateway": "g1", "requests": rows}, headers=GATEWAY)

    def test_members_see_that_of_their_own_team(self, client: TestClient) -> None:
        assert [row["id"] for row in client.get("/v1/usage").json()["rows"]] == ["r2", "r1"]
        assert [row["id"] for row in client.get("/v1/usage", headers=BOB).json()["rows"]] == ["r3"]
        assert client.get("/v1/usage", params={"team": "research"}).status_code == 403
        assert len(client.get("/v1/usage", headers=ROOT).json()["rows"]) == 3
        only = {"team": "research"}
        assert [row["id"] for row in client.get("/v1/usage", headers=ROOT, params=only).json()["rows"]] == ["r3"]

    def test_it_has_pages_filters_and_groups(self, client: TestClient) -> None:
        page = client.get("/v1/usage", params={"limit": 1}, headers=ROOT).json()
        assert [row["id"] for row in page["rows"]] == ["r3"]
        rest = client.get("/v1/usage", params={"before": page["before"]}, headers=ROOT).json()
        assert ([row["id"] for row in rest["rows"]], rest["before"]) == (["r2", "r1"], None)
        sums = client.get("/v1/usage/key", params={"until_s": 1500.0}, headers=ROOT).json()
        assert [(each["group"], each["requests"], each["errors"], each["cost_micro_usd"]) for each in sums] == [
            ("key-1", 2, 1, 3)
        ]
        assert client.get("/v1/usage/nothing").status_code == 400


class TestAudit:
    def test_changes_name_the_caller_and_operators_read_them(self, client: TestClient, clock: VirtualClock) -> None:
        create(client)
        clock.advance(5.0)
        job = client.post("/v1/jobs", json=GANG, headers=ROOT).json()["job"]["id"]
        as_job = {"Authorization": f"Bearer {token_of(job, b'k' * 32)}"}
        client.post(f"/v1/jobs/{job}/stop", headers=as_job)
        client.patch("/v1/teams/default", json={"weight": 2}, headers=ROOT)
        entries = client.get("/v1/audit", headers=ROOT).json()
        assert [(e["actor"], e["action"], e["object"], e["at_s"]) for e in entries[::-1]] == [
            ("ana", "key.create", "key-1", 1000.0),
            ("root", "job.submit", "job-1", 1005.0),
            ("root/job-1", "job.stop", "job-1", 1005.0),
            ("root", "team.change", "default", 1005.0),
        ]
        assert client.get("/v1/audit").status_code == 403
        assert client.get("/v1/audit/verify").status_code == 403
        one = client.get("/v1/audit", params={"action": "job.", "limit": 1, "before": 3}, headers=ROOT).json()
        assert [entry["seq"] for entry in one] == [2]

    def test_a_check_covers_the_requests_of_gateways(self, client: TestClient) -> None:
        client.post("/v1/gateway/usage", json={"gateway": "g1", "requests": [ROW]}, headers=GATEWAY)
        verdict = client.get("/v1/audit/verify", headers=ROOT).json()
        assert (verdict["broken_seq"], verdict["entries"], verdict["requests"]) == (None, 1, 1)
        head = f"{verdict['head_seq']}:{verdict['head_hash']}"
        assert client.get("/v1/audit/verify", params={"head": head}, headers=ROOT).json()["broken_seq"] is None
        other = f"1:{'0' * 64}"
        assert client.get("/v1/audit/verify", params={"head": other}, headers=ROOT).json()["broken_seq"] == 1
        assert client.get("/v1/audit/verify", params={"head": "x"}, headers=ROOT).status_code == 400
