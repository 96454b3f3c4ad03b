"""Replicas open nothing outside of the cluster's data roots, whatever the API accepted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from raytide.control.bootstrap.local import DEFAULT_CONFIG
from raytide.core.io.process import free_port

pytestmark = pytest.mark.cluster

HEAD = "127.0.62.1"
DEPLOY = """
import sys, time
from pathlib import Path
from raytide.control.bootstrap.cluster_record import HeadCluster
from raytide.control.bootstrap.wiring import sources
from raytide.core.errors import WaitTimeoutError
from raytide.core.objects.endpoint import Endpoint, EndpointState, Replicas, ServeSpec

run_dir, gcs_address, port = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
cluster = HeadCluster(
    name="tide", cluster_id="tide-1", run_dir=run_dir, gcs_address=gcs_address, dashboard_url="http://127.0.0.1:9",
    api_url="http://127.0.0.1:9", serve_url=f"http://127.0.62.1:{port}", state_url="",
    config_path=run_dir / "cluster.yaml", created_at_s=0.0, version="",
)
control = sources(cluster).serve
control.start()
places = {"inside": run_dir / "data" / "model", "outside": run_dir / "elsewhere", "linked": run_dir / "data" / "linked"}
for name, model in places.items():
    spec = ServeSpec(name=name, model=str(model), replicas=Replicas(min=1, max=1), engine={"kind": "fake"})
    endpoint = Endpoint(spec=spec, user="me", state=EndpointState.DEPLOYING, created_at_s=0.0, target_replicas=1)
    control.deploy(endpoint, is_there=False)
until_s = time.monotonic() + 240
while time.monotonic() < until_s:
    try:
        seen, loads = control.applications(), control.loads(list(places))
    except WaitTimeoutError:  # Serve is busy
        continue
    failed = {name: seen[name].failure for name in ("outside", "linked") if name in seen and seen[name].failure}
    if len(failed) == 2 and "inside" in loads and loads["inside"].ready == 1:
        break
    time.sleep(0.2)
print(sorted(name for name, load in loads.items() if load.ready), *failed.values())
"""


@pytest.fixture
def gcs_address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=3, node_ip_address=HEAD, include_dashboard=False, object_store_memory=80 << 20)
        yield cluster.address
    finally:
        cluster.shutdown()


def test_a_replica_opens_no_model_outside_of_the_data_roots(gcs_address: str, tmp_path: Path) -> None:
    """The engine is a fake one: the check comes before any engine is made."""
    for folder in ("data/model", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    file = yaml.safe_load(DEFAULT_CONFIG.read_text()) | {"provider": {"type": "fake"}}
    file["metadata"]["raytide"]["data_roots"] = [str(tmp_path / "data")]
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(file))
    done = subprocess.run(
        [sys.executable, "-c", DEPLOY, str(tmp_path), gcs_address, str(free_port())],
        timeout=400, capture_output=True, check=False, text=True, env=dict(os.environ),
    )  # fmt: skip
    assert done.stdout.startswith("['inside']"), done.stdout + done.stderr
    assert done.stdout.count("is outside the data roots of this cluster") >= 2
