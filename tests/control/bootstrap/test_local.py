"""Addresses, names and the ways an `up` can fail, without starting Ray."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import MARK, LocalCluster, load, run_dir_of
from raytide.control.bootstrap.loopback import ANY, claim, is_free
from raytide.control.supervision.daemon import hold_lock, spawn
from raytide.core.errors import ClusterError, ConfigError, ConflictError, NotFoundError, UsageError
from raytide.core.io.process import Process, marked
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import JobKind, JobSpec
from raytide.core.state import Store

K = 249 - 4 * (os.getpid() % 9)
"""Clusters count up from 2, and machines of sshd and Slurm from 200, so nobody is here, and hardly the suite of another
checkout. K and the three below it are this process's own."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, standin_path: str) -> Path:
    monkeypatch.setenv("RAYTIDE_HOME", str(tmp_path))
    monkeypatch.delenv("RAYTIDE_CLUSTER_NAME", raising=False)
    return tmp_path


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with closing(socket.create_server((f"127.0.{K}.1", local.API_PORT))) as listening:
        yield listening


@pytest.fixture
def idle_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Ray's place a process that does nothing, with a child of its own."""

    def start_head(of: LocalCluster, *, environment: Mapping[str, str], pass_fds: Sequence[int] = ()) -> Process:
        argv = ["sh", "-c", "setsid sleep 1000 & exec sleep 1000"]
        return spawn("head", argv, run_dir=of.run_dir, environment=environment, pass_fds=pass_fds)

    monkeypatch.setattr(local, "start_head", start_head)
    monkeypatch.setattr(local, "wait_for_head", lambda *args, **kwargs: None)


_UP_THAT_HANGS = f"""
import signal
from raytide.control.bootstrap import local
from raytide.control.supervision.daemon import spawn

def start_head(of, *, environment, pass_fds):
    return spawn("head", ["sleep", "1000"], run_dir=of.run_dir, environment=environment)

def wait_for_head(*args, **kwargs):
    print("up", flush=True)
    signal.pause()

local.start_head, local.wait_for_head = start_head, wait_for_head
local.up(k={K})
"""

STANDINS = {"controller": "standin_child", "api": "standin_api"}


def test_two_claims_never_get_the_same_addresses() -> None:
    first, held = claim({K: [], K - 1: []})
    second, also_held = claim({K: [], K - 1: []})
    with held, also_held:
        assert (first, second) == (K, K - 1)
        with pytest.raises(ConflictError, match=rf"127\.0\.{K}\.\* belongs to another cluster"):
            claim({K: []})
    again, held = claim({K: []})
    held.close()
    assert again == K


def test_a_port_in_use_is_named_and_nothing_is_started(home: Path, listener: socket.socket) -> None:
    with pytest.raises(ConflictError, match=rf"port 7400 is in use on 127\.0\.{K}\.1"):
        local.up(k=K)
    assert not run_dir_of("local").exists()
    assert not is_free(f"127.0.{K}.1", local.API_PORT)


def test_a_port_that_listens_on_every_address_is_taken_by_a_listener_on_any() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(ConflictError, match=f"port {port} is in use on this machine"):
            claim({K: [(ANY, port)]})
        claim({K: [(f"127.0.{K}.1", port)]})[1].close()


def test_a_broken_config_is_refused_before_anything_is_started(home: Path) -> None:
    config = home / "cluster.yaml"
    config.write_text(local.DEFAULT_CONFIG.read_text().replace("price_usd_h: 0.0832", "price_usd_h: -1"))
    with pytest.raises(ConfigError, match="price_usd_h"):
        local.up(config, k=K)
    with pytest.raises(ConfigError, match="cannot read"):
        local.up(home / "none.yaml", k=K)
    assert not run_dir_of("local").exists()


@pytest.mark.parametrize("name", ["", "a/b", "..", "x" * 41])
def test_a_name_that_is_no_folder_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="not a cluster name"):
        local.up(name=name)


def test_a_cluster_that_is_not_up_is_not_found() -> None:
    with pytest.raises(NotFoundError, match="cluster other is not running"):
        local.find("other")
    local.down("other")


def test_an_up_writes_private_files_and_a_second_is_refused(idle_head: None) -> None:
    started = local.up(k=K, children=STANDINS)
    try:
        assert load(started.run_dir) == local.find() == started
        assert started.gcs_address == f"127.0.{K}.1:{6379 + K}"
        assert started.run_dir.stat().st_mode & 0o777 == 0o700
        for file in (started.client_file, started.tokens_file, started.ray_token_file):
            assert file.stat().st_mode & 0o777 == 0o600
        assert started.temp_dir.stat().st_mode & 0o777 == 0o700
        with pytest.raises(ConflictError, match="is already up"):
            local.up(k=K, children=STANDINS)
    finally:
        local.down()
    assert marked(MARK, started.cluster_id) == []
    assert not started.client_file.exists()
    local.down()


def test_an_up_while_another_is_at_work_is_refused(home: Path) -> None:
    (home / "clusters").mkdir()
    with hold_lock(home / "clusters" / ".local.lock"), pytest.raises(ConflictError, match="another process holds"):
        local.up(k=K)


@pytest.mark.parametrize("error", [ClusterError("the head ended"), KeyboardInterrupt()])
def test_a_failed_or_interrupted_up_leaves_nothing(
    idle_head: None, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(local, "wait_for_head", fail)
    with pytest.raises(type(error)):
        local.up(k=K, children=STANDINS)
    left = load(run_dir_of("local"))
    assert left is not None
    assert marked(MARK, left.cluster_id) == []
    with pytest.raises(NotFoundError):
        local.find()


def test_an_api_that_never_answers_fails_the_up_and_names_its_log(idle_head: None) -> None:
    with pytest.raises(ClusterError, match="did not answer") as caught:
        local.up(k=K, children={"api": "no_such_module"}, timeout_s=1.0)
    assert "api.log" in caught.value.hint
    left = load(run_dir_of("local"))
    assert left is not None
    assert marked(MARK, left.cluster_id) == []


def test_the_next_up_adopts_what_a_killed_supervisor_left(idle_head: None) -> None:
    started = local.up(k=K, children=STANDINS)
    try:
        children = [started.process(what) for what in ("head", "controller", "api")]
        supervisor = started.process("supervisor")
        assert supervisor is not None
        subprocess.run(["kill", "-9", str(supervisor.pid)], check=True)
        supervisor.wait(None)
        assert local.up(k=K, children=STANDINS) == started
        assert [started.process(what) for what in ("head", "controller", "api")] == children
        assert started.process("supervisor") != supervisor
    finally:
        local.down()
    assert marked(MARK, started.cluster_id) == []


def test_after_a_crash_the_next_up_ends_the_rest_and_keeps_the_old_folder(idle_head: None, home: Path) -> None:
    crashed = local.up(k=K, children=STANDINS)
    head = crashed.process("head")
    assert head is not None
    subprocess.run(["kill", "-9", str(head.pid)], check=True)
    head.wait(None)
    started = local.up(k=K - 1, children=STANDINS)
    try:
        assert marked(MARK, crashed.cluster_id) == []
        assert started.cluster_id != crashed.cluster_id
        (kept,) = (home / "clusters").glob("local@*")
        assert (kept / "logs" / "supervisor.log").exists()
    finally:
        local.down()


def test_a_cluster_starts_again_with_the_file_in_its_own_folder(idle_head: None, home: Path) -> None:
    try:
        first = local.up(k=K, children=STANDINS)
        local.down()
        file = first.config_path.read_text()
        again = local.up(first.config_path, k=K - 1, children=STANDINS)
        assert again.config_path == first.config_path
        assert again.config_path.read_text() == file
        (kept,) = (home / "clusters").glob("local@*")
        assert (kept / "cluster.yaml").read_text() == file
    finally:
        local.down()


def test_a_restored_cluster_whose_start_fails_is_not_set_aside(
    idle_head: None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/runbooks/lost-head.md: its state is in the folder, and no record."""
    run_dir = run_dir_of("local")
    run_dir.mkdir(parents=True)
    (run_dir / "cluster.yaml").write_text(local.DEFAULT_CONFIG.read_text())
    spec = JobSpec(kind=JobKind.GANG, name="kept", gang=GangSpec(shapes=(Shape(resources={"CPU": 1.0}),)))
    with closing(Store.open(f"sqlite:///{run_dir / 'state.db'}")) as store:
        job = store.submit_job(spec, "ana", 1.0)

    def fail(*args: object, **kwargs: object) -> None:
        raise ClusterError("the head was too slow")

    with monkeypatch.context() as patched:
        patched.setattr(local, "wait_for_head", fail)
        with pytest.raises(ClusterError, match="too slow"):
            local.up(run_dir / "cluster.yaml", k=K, children=STANDINS)
    try:
        started = local.up(run_dir / "cluster.yaml", k=K, children=STANDINS)
        with closing(Store.open(started.state_url)) as store:
            assert store.job(job.id) == job
        assert list((home / "clusters").glob("local@*")) == []
    finally:
        local.down()


def test_an_up_that_was_killed_before_it_wrote_anything_down_is_no_obstacle(idle_head: None, home: Path) -> None:
    (home / "clusters" / "local" / "pids").mkdir(parents=True)
    try:
        assert local.up(k=K, children=STANDINS).is_alive("head")
    finally:
        local.down()


def test_an_up_that_was_killed_is_ended_by_down(home: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", _UP_THAT_HANGS], stdout=subprocess.PIPE, env=os.environ.copy())
    assert killed.stdout is not None
    assert killed.stdout.readline() == b"up\n"
    killed.kill()
    killed.wait()
    killed.stdout.close()
    left = local.find()
    assert marked(MARK, left.cluster_id) != []
    local.down()
    assert marked(MARK, left.cluster_id) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is told that there is no such user")
def test_a_user_that_scripts_cannot_run_as_is_refused_before_anything_is_started(home: Path) -> None:
    file = yaml.safe_load(local.DEFAULT_CONFIG.read_text())
    file["metadata"]["raytide"]["run_as"] = "no-such-user"
    (home / "other.yaml").write_text(yaml.safe_dump(file))
    with pytest.raises(ConfigError, match="there is no such user"):
        local.up(home / "other.yaml", k=K)
    assert local.down() is None


def test_bounds_of_an_alert_that_is_not_there_are_refused_before_anything_is_started(home: Path) -> None:
    config = home / "cluster.yaml"
    config.write_text(
        local.DEFAULT_CONFIG.read_text().replace(
            "  raytide:\n", "  raytide:\n    monitoring: {alerts: {NodeDiskFul: {bound: 0.5}}}\n", 1
        )
    )
    with pytest.raises(ConfigError, match="there is no alert NodeDiskFul"):
        local.up(config)
    assert not local.run_dir_of("local").exists()
