"""A cluster that somebody owns ends with its owner, whoever is killed and how."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.control.bootstrap.test_local import STANDINS, K, home, idle_head
from tests.disk_fixture import Disk

from raytide.autoscaler.providers.local.files import LocalMachine, NodeFolder
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import MARK, LocalCluster
from raytide.core.errors import StorageError
from raytide.core.io.process import Process, marked, running

__all__ = ["home", "idle_head"]


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def owned(idle_head: None, owner: subprocess.Popen[bytes]) -> Iterator[LocalCluster]:
    yield local.up(k=K - 2, children=STANDINS, owner=Process.of(owner.pid))
    local.down()


def watcher(of: LocalCluster) -> Process | None:
    return next(iter(running(["-m", "raytide.control.bootstrap.owner_watch", str(of.run_dir), of.cluster_id])), None)


def nothing_is_left(of: LocalCluster) -> bool:
    return not marked(MARK, of.cluster_id) and watcher(of) is None


def test_it_ends_with_its_owner_in_order(
    owned: LocalCluster, owner: subprocess.Popen[bytes], eventually: Callable[..., None]
) -> None:
    assert watcher(owned) is not None
    assert owned.is_alive("head")
    owner.kill()
    owner.wait()
    eventually(lambda: nothing_is_left(owned))
    assert not owned.client_file.exists()
    assert not owned.temp_dir.exists()


@pytest.mark.parametrize("killed", ["watcher", "supervisor"])
def test_it_ends_with_its_owner_when_another_part_was_killed_before(
    owned: LocalCluster, owner: subprocess.Popen[bytes], eventually: Callable[..., None], killed: str
) -> None:
    first = watcher(owned) if killed == "watcher" else owned.process("supervisor")
    assert first is not None
    first.send(signal.SIGKILL)
    if killed == "watcher":
        eventually(lambda: watcher(owned) not in (None, first))
    owner.kill()
    owner.wait()
    eventually(lambda: nothing_is_left(owned))


def test_an_up_that_is_killed_half_way_leaves_nothing(home: Path, eventually: Callable[..., None]) -> None:
    """Nobody else could end it: there is no supervisor yet."""
    script = f"""
import os, signal
from raytide.control.bootstrap import local as cluster
from raytide.control.supervision.daemon import spawn
from raytide.core.errors import StorageError
from raytide.core.io.process import Process

def start_head(of, *, environment, pass_fds):
    process = spawn("head", ["sleep", "1000"], run_dir=of.run_dir, environment=environment)
    os.kill(os.getpid(), signal.SIGKILL)

cluster.start_head = start_head
cluster.up(k={K - 3}, owner=Process.of(os.getpid()))
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    run_dir = local.run_dir_of("local")
    eventually(lambda: not running(["-m", "raytide.control.bootstrap.owner_watch", str(run_dir), _id(run_dir)]))
    assert marked(MARK, _id(run_dir)) == []


def _id(run_dir: Path) -> str:
    import json

    return str(json.loads((run_dir / "cluster.json").read_text())["cluster_id"])


def test_one_that_nobody_owns_has_no_watcher(idle_head: None) -> None:
    started = local.up(k=K - 2, children=STANDINS)
    try:
        assert watcher(started) is None
    finally:
        local.down()


def test_a_full_disk_keeps_no_cluster_from_being_ended(
    idle_head: None, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its books are closed by the next `down`, when there is room."""
    monkeypatch.setenv("RAYTIDE_HOME", str(disk.path))
    started = local.up(k=K - 2, children=STANDINS)
    node = NodeFolder(started.run_dir / "nodes" / "node-1")
    node.path.mkdir()
    node.buy(LocalMachine("node-1", "cpu2", "local", 1, started.created_at_s, 2, "", {}, {}, "", ""))
    disk.fill()
    with pytest.raises(StorageError, match=r"[Ff]ree space"):
        local.down()
    assert marked(MARK, started.cluster_id) == []
    assert not started.temp_dir.exists()
    disk.free()
    assert local.down() is not None
    assert node.end() is not None


def test_an_up_on_a_full_disk_says_so_and_leaves_nothing(
    idle_head: None, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYTIDE_HOME", str(disk.path))
    (disk.path / "clusters").mkdir()
    disk.fill()
    with pytest.raises(StorageError, match=r"[Ff]ree space"):
        local.up(k=K - 2, children=STANDINS)
    disk.free()
    local.up(k=K - 2, children=STANDINS)
    local.down()
