"""raytide on the head of a cloud, without Ray: what is refused, and how it ends. test_ray_up_real.py has the rest."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.autoscaler.providers.kube_server import KubeServer

from raytide.control.bootstrap import wiring
from raytide.control.bootstrap.cluster_record import MARK, HeadCluster, run_dir_of
from raytide.control.bootstrap.control_plane import grant_access
from raytide.control.bootstrap.head import cloud_head, guard
from raytide.control.bootstrap.head.ending import dismiss
from raytide.control.bootstrap.local import DEFAULT_CONFIG
from raytide.control.supervision.daemon import spawn
from raytide.core.errors import ClusterError, ConfigError
from raytide.core.io.process import Process, kill_marked
from raytide.core.state import Store


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeadCluster]:
    """The record of one whose nodes are nowhere."""
    monkeypatch.setenv("RAYTIDE_HOME", str(tmp_path))
    run_dir = run_dir_of("local")
    for folder in ("pids", "logs"):
        (run_dir / folder).mkdir(parents=True)
    file = yaml.safe_load(DEFAULT_CONFIG.read_text()) | {"provider": {"type": "fake"}}
    (run_dir / "cluster.yaml").write_text(yaml.safe_dump(file))
    one = HeadCluster(
        name="local",
        cluster_id=f"test-{tmp_path.name}",
        run_dir=run_dir,
        gcs_address="127.0.9.1:6388",
        dashboard_url="",
        api_url="",
        serve_url="",
        state_url=f"sqlite:///{run_dir / 'state.db'}",
        config_path=run_dir / "cluster.yaml",
        created_at_s=0.0,
        version="",
    )
    one.save()
    yield one
    kill_marked(MARK, one.cluster_id)


def start(cluster: HeadCluster, what: str, seconds: float) -> None:
    spawn(what, ["sleep", str(seconds)], run_dir=cluster.run_dir, environment=cluster.environment())


def test_a_head_without_ray_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(ClusterError, match="Ray is not running on this machine") as refused:
        cloud_head.start(DEFAULT_CONFIG)
    assert "--no-monitor" in refused.value.hint


def test_an_embedded_clusters_folder_is_not_taken(cluster: HeadCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.loads((cluster.run_dir / "cluster.json").read_text())
    (cluster.run_dir / "cluster.json").write_text(json.dumps(record | {"k": 9, "temp_dir": "/nowhere"}))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.9.1:6388")
    with pytest.raises(ConfigError, match="belongs to an embedded cluster"):
        cloud_head.start(cluster.config_path)


def test_a_container_ends_with_its_supervisor_and_takes_the_children_along(cluster: HeadCluster) -> None:
    before = signal.getsignal(signal.SIGTERM)
    start(cluster, "controller", 1000.0)
    start(cluster, "supervisor", 0.1)
    try:
        cloud_head.run_foreground(cluster)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not cluster.is_alive("controller")


def test_only_a_supervisor_that_down_did_not_end_is_an_error_of_the_foreground(cluster: HeadCluster) -> None:
    """systemd starts the command again after an error."""
    before = signal.getsignal(signal.SIGTERM)
    grant_access(cluster)
    start(cluster, "supervisor", 0.1)
    try:
        with pytest.raises(ClusterError, match="supervisor of cluster local ended"):
            cloud_head.run_foreground(cluster)
        cloud_head.down(cluster)
        cloud_head.run_foreground(cluster)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_down_ends_the_guard_at_once_and_without_an_error() -> None:
    """systemd would start it again after an error, and it would lead."""
    code = "import time; from raytide.control.bootstrap.head.guard import heed_signals; heed_signals(None)"
    command = [sys.executable, "-c", f"{code}; print('ready', flush=True); time.sleep(600)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        running = Process.of(child.pid)
        assert running is not None
        dismiss(running)
        assert child.wait(60) == 0


def test_down_ends_what_runs_here_and_closes_the_books(cluster: HeadCluster) -> None:
    for what in ("supervisor", "controller", "api"):
        start(cluster, what, 1000.0)
    shutil.copyfile(cluster.config_path, cluster.client_file)
    closed = cloud_head.down(cluster)
    assert (closed.nodes, closed.differences) == ((), ())
    assert not any(cluster.is_alive(what) for what in ("supervisor", "controller", "api"))
    assert not cluster.client_file.exists()


def test_down_in_a_pod_of_kuberay_ends_the_head_too(cluster: HeadCluster) -> None:
    """Kubernetes restarts the container of `raytide head`, which would start the cluster again."""
    kube = KubeServer({})
    section = {"type": "kuberay", "api_url": kube.url, "namespace": "ml"}
    file = yaml.safe_load(cluster.config_path.read_text()) | {"provider": section}
    cluster.config_path.write_text(yaml.safe_dump(file))
    try:
        cloud_head.down(cluster)
    finally:
        kube.close()
    assert kube.cluster["spec"]["suspend"] is True


def test_tokens_of_users_outlive_down_and_up(cluster: HeadCluster) -> None:
    grant_access(cluster)
    operators = json.loads(cluster.client_file.read_text())["token"]
    users = {"ana's": {"user": "ana", "team": "research"}}
    cluster.tokens_file.write_text(json.dumps(json.loads(cluster.tokens_file.read_text()) | users))
    cloud_head.down(cluster)
    assert not cluster.client_file.exists() and not cluster.gateway_file.exists()
    grant_access(cluster)
    tokens = json.loads(cluster.tokens_file.read_text())
    gateways = json.loads(cluster.gateway_file.read_text())["token"]
    assert tokens == {**users, operators: {"user": "admin", "team": "*"}, gateways: {"role": "gateway"}}
    assert json.loads(cluster.client_file.read_text())["token"] == operators
    files = (cluster.tokens_file, cluster.client_file, cluster.gateway_file)
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_a_head_whose_operators_token_was_taken_away_gets_another_one(cluster: HeadCluster) -> None:
    users = {"ana's": {"user": "ana", "team": "research"}}
    cluster.tokens_file.write_text(json.dumps(users))
    grant_access(cluster)
    tokens = json.loads(cluster.tokens_file.read_text())
    assert len(tokens) == 3 and tokens.items() > users.items()


def test_rays_token_goes_from_the_environment_into_a_file(
    cluster: HeadCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is started below would have it in its own."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    cloud_head._file_token(cluster.run_dir)
    assert "RAY_AUTH_TOKEN" not in cluster.environment()
    assert cluster.ray_token_file is not None
    assert cluster.ray_token_file.stat().st_mode & 0o777 == 0o600
    assert cluster.ray_headers == {"Authorization": "Bearer secret"}
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")


def test_a_token_in_rays_usual_place_is_asked_for_unless_the_mode_says_otherwise(
    cluster: HeadCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As Ray itself finds it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert cluster.ray_token_file is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    assert cluster.ray_access["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / ".ray" / "auth_token")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert cluster.ray_token_file is None


def test_a_ray_that_is_open_to_others_is_refused_unless_wanted(
    cluster: HeadCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens where its dashboard would: it does not say that it asks for a token."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    monkeypatch.setattr(cloud_head, "gcs_address_here", lambda: "10.0.0.7:6379")
    monkeypatch.setattr(cloud_head, "_dashboard", lambda *_: "http://127.0.0.1:9")
    started: list[HeadCluster] = []
    monkeypatch.setattr(cloud_head, "start_supervisor", started.append)
    monkeypatch.setattr(cloud_head, "wait_for_api", lambda *_, **__: None)
    file = cluster.run_dir.parent / "given.yaml"
    shutil.copyfile(cluster.config_path, file)
    with pytest.raises(ClusterError, match="does not require a token") as refused:
        cloud_head.start(file)
    assert "--insecure" in refused.value.hint
    assert started == []
    assert cloud_head.start(file, insecure=True).gcs_address == "10.0.0.7:6379"
    assert len(started) == 1


def test_heads_share_the_purchases_at_every_provider() -> None:
    folders = {wiring.HOSTS_FOLDER, wiring.SLURM_FOLDER, wiring.CLOUDS_FOLDER, wiring.PURCHASES}
    assert folders <= set(guard._SHARED)


def test_a_machine_that_waits_upgrades_no_state(cluster: HeadCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, object]] = []

    def open_store(url: str, **options: object) -> None:
        opened.append(options)
        raise ClusterError("that was it.")

    monkeypatch.setattr(Store, "open", open_store)
    waiting = object.__new__(guard.HeadGuard)
    waiting._cluster = cluster
    with pytest.raises(ClusterError, match="that was it"):
        waiting.run()
    assert opened == [{"upgrades": False}]
