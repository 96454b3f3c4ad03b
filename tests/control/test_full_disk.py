"""A full disk below the run folder: the control plane stays, says so, loses nothing that it accepted, and goes on."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from tests.control.test_controller import CONFIG, Loop
from tests.disk_fixture import Disk

from raytide.control.api.auth import Tokens
from raytide.control.api.routes import create_app
from raytide.control.api.services.service import ApiService
from raytide.control.supervision.daemon import spawn
from raytide.core.clock import VirtualClock
from raytide.core.errors import StorageError
from raytide.core.io.process import Process, kill_marked, running
from raytide.core.objects.job import JobState

GANG = {"kind": "gang", "name": "g", "gang": {"shapes": [{"members": 1, "resources": {"CPU": 1.0}}]}}
MARK = "RAYTIDE_TEST"


class NoBill:
    def machines(self) -> tuple[object, ...]:
        return ()


@pytest.fixture
def loop(disk: Disk) -> Iterator[Loop]:
    made = Loop(disk.path)
    yield made
    made.store.close()


@pytest.fixture
def api(disk: Disk, loop: Loop) -> Iterator[TestClient]:
    desk = ApiService(
        store=loop.store,
        config=CONFIG,
        bill=NoBill(),  # type: ignore[arg-type]
        drivers=None,  # type: ignore[arg-type]
        clock=loop.clock,
        live=disk.path / "live.json",
        serve_url="",
        ray_url="",
        ray_environment={},
    )
    (disk.path / "tokens.json").write_text(json.dumps({"root": {"user": "root", "team": "*"}}))
    with TestClient(create_app(desk, Tokens(disk.path / "tokens.json"))) as client:
        client.headers["Authorization"] = "Bearer root"
        yield client


def submit_until_refused(api: TestClient) -> list[str]:
    """Every submit that was accepted; the last one, which was not, is a 507 that says what to do."""
    accepted = []
    while (response := api.post("/v1/jobs", json=GANG)).is_success:
        accepted.append(response.json()["job"]["id"])
    assert response.status_code == 507
    assert response.json()["error"]["code"] == "storage"
    assert "Free space" in response.json()["error"]["hint"]
    return accepted


def test_what_was_accepted_before_a_disk_was_full_is_there_after_it(api: TestClient, disk: Disk, loop: Loop) -> None:
    first = loop.submit()
    loop.until(lambda: loop.state(first) is JobState.RUNNING)
    disk.fill()
    accepted = submit_until_refused(api)
    health = api.get("/health").json()
    assert health["ok"] is True
    assert {"disk", "store"} <= set(health["troubles"])
    assert any("free space" in error for error in api.get("/v1/status").json()["errors"])
    page = api.get("/metrics").text
    assert 'raytide_trouble{what="disk"} 1.0' in page
    assert "raytide_disk_free_bytes" in page
    disk.free()
    assert [job.id for job in loop.store.jobs(active=True, limit=10_000)][::-1] == [first, *accepted]
    assert api.post("/v1/jobs", json=GANG).is_success
    assert "store" not in api.get("/health").json()["troubles"]
    loop.tick(3)
    assert loop.state(first) is JobState.RUNNING
    loop.check_ledger()


def test_the_controller_outlives_a_full_disk_and_goes_on(
    api: TestClient, disk: Disk, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run` itself, on a clock that moves while it waits."""
    job = loop.submit()
    waits: list[float] = []
    later: list[str] = []

    class Wake(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            loop.clock.advance(timeout)
            waits.append(timeout)
            if len(waits) == 10:
                later.append(loop.submit())
                disk.fill()
                submit_until_refused(api)
            if len(waits) == 40:
                disk.free()
            if len(waits) == 80:
                loop.controller.stop()
            return True

    loop.controller._wake = Wake()
    monkeypatch.setattr(type(loop.controller._sources.meters), "close", lambda self: None, raising=False)
    loop.controller.run()
    assert len(waits) == 80, "it went on to the end"
    assert max(waits[10:40]) > CONFIG.settings.tick_s, "it backs off"
    assert waits[-1] == CONFIG.settings.tick_s
    assert {loop.state(each) for each in (job, *later)} == {JobState.RUNNING}
    loop.check_ledger()


def test_a_package_that_finds_no_room_is_refused_and_leaves_nothing(api: TestClient, disk: Disk) -> None:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as package:
        package.writestr("train.py", os.urandom(1 << 20))
    data, digest = written.getvalue(), hashlib.sha256(written.getvalue()).hexdigest()
    disk.fill()
    answer = api.put(f"/v1/packages/{digest}", content=data)
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "storage")
    disk.free()
    assert not any((disk.path / "packages").glob("*")) and not any((disk.path / "packages").glob(".*"))
    assert api.put(f"/v1/packages/{digest}", content=data).is_success
    assert api.get(f"/v1/packages/{digest}").content == data


def test_no_node_is_bought_that_cannot_be_recorded(disk: Disk, tmp_path: Path) -> None:
    from raytide.autoscaler.providers.local.provider import LocalProvider
    from raytide.autoscaler.providers.purchases import Purchases
    from raytide.core.objects.node import CapacityType, Node, NodeState

    (disk.path / "run").mkdir()
    (disk.path / "clouds").mkdir()
    provider = LocalProvider(
        disk.path / "run", "127.0.9.1:1", 9, VirtualClock(1.0), temp_dir=tmp_path, node_module="no.such.module"
    )
    purchases = Purchases(disk.path / "clouds")
    node_type = CONFIG.node_types[0]
    node = Node("node-1", node_type.name, "local", CapacityType.ON_DEMAND, 1, NodeState.REQUESTED, 1.0)
    disk.fill()
    with pytest.raises(OSError, match="No space left"):
        provider.launch(node, node_type)
    with pytest.raises(StorageError, match="no space left"):
        purchases.check_room()
    assert provider.machines() == ()
    disk.free()
    purchases.check_room()
    provider.close()


class TestSupervisor:
    """The real supervisor and real processes as its children, their run folder on the full disk."""

    @pytest.fixture
    def run_dir(self, disk: Disk, standin_path: str) -> Iterator[Path]:
        for folder in ("pids", "logs"):
            (disk.path / folder).mkdir()
        yield disk.path
        kill_marked(MARK, str(disk.path))

    def start(self, run_dir: Path, *, module: str = "standin_child") -> Process:
        argv = [sys.executable, "-m", "raytide.control.supervision.supervisor", str(run_dir), f"controller={module}"]
        return spawn("supervisor", argv, run_dir=run_dir, environment={**os.environ, MARK: str(run_dir)})

    def when(self, condition: Callable[[], Process | None]) -> Process:
        pause = threading.Event()
        while (process := condition()) is None:
            pause.wait(0.02)
        return process

    def child(self, run_dir: Path, *, other_than: Process | None = None) -> Process | None:
        found = running(["-m", "standin_child", str(run_dir)])
        return next((one for one in found if other_than is None or one.pid != other_than.pid), None)

    def recorded(self, run_dir: Path, of: Process) -> Process | None:
        found = Process.read(run_dir / "pids" / "controller.json")
        return found if found is not None and found.pid == of.pid else None

    def test_it_starts_a_killed_child_again_and_records_it_when_there_is_room(self, run_dir: Path, disk: Disk) -> None:
        supervisor = self.start(run_dir)
        first = self.when(lambda: self.child(run_dir))
        self.when(lambda: self.recorded(run_dir, first))
        disk.fill()
        first.send(signal.SIGKILL)
        second = self.when(lambda: self.child(run_dir, other_than=first))
        assert supervisor.alive
        assert self.recorded(run_dir, second) is None
        disk.free()
        self.when(lambda: self.recorded(run_dir, second))
        supervisor.send(signal.SIGTERM)
        assert supervisor.wait(120.0)
        assert not second.alive

    def test_the_next_one_adopts_a_child_that_was_never_recorded(self, run_dir: Path, disk: Disk) -> None:
        supervisor = self.start(run_dir)
        first = self.when(lambda: self.child(run_dir))
        self.when(lambda: self.recorded(run_dir, first))
        disk.fill()
        first.send(signal.SIGKILL)
        second = self.when(lambda: self.child(run_dir, other_than=first))
        supervisor.send(signal.SIGKILL)
        assert supervisor.wait(120.0)
        disk.free()
        after = self.start(run_dir)
        self.when(lambda: self.recorded(run_dir, second))
        after.send(signal.SIGTERM)
        assert after.wait(120.0)
        assert not second.alive

    def test_a_process_that_cannot_be_recorded_by_its_starter_is_ended_again(self, run_dir: Path, disk: Disk) -> None:
        (run_dir / "logs" / "supervisor.log").touch()
        disk.fill()
        with pytest.raises(StorageError, match="no space left"):
            self.start(run_dir)
        assert running(["-m", "raytide.control.supervision.supervisor", str(run_dir), "controller=standin_child"]) == []
        disk.free()
