"""A type of node is measured by a job on the session's cluster."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import raytide as rt
from raytide.control.bootstrap.local import DEFAULT_CONFIG
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.objects.job import JobState

pytestmark = [pytest.mark.cluster, pytest.mark.soak]


def test_two_nodes_of_a_type_are_measured(
    tide: rt.Client, raytide_cli: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    types = [
        each for each in tide.client.snapshot().node_types if each.max_nodes >= 2 and not each.resources.get("GPU")
    ]
    node_type = min(types, key=lambda each: (each.resources["CPU"], each.name))
    options = ["--nodes", "2", "--seconds", "0.2", "--disk-mib", "4", "--reference", node_type.name, "--json"]
    options += ["--write", str(config := Path(shutil.copy(DEFAULT_CONFIG, tmp_path)))]
    done = raytide_cli("bench", "node", node_type.name, *options, timeout_s=280.0)
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    first, second = body["reports"]
    assert body["speed"] > 0
    (written,) = (each for each in load_cluster(config).node_types if each.name == node_type.name)
    assert written.speed == body["written"] == body["speed"], "the reference's own is 1"
    assert len(first["nodes"]) == len(second["nodes"]) == 2
    assert first["nodes"][0]["all_reduce_bytes_per_s"] > 0
    run = tide.job(first["job"])
    assert run.state is JobState.SUCCEEDED
    assert run.view.job.spec.gang.shapes[0].members == 2
    assert raytide_cli("bench", "node", "none-such").returncode == 4
