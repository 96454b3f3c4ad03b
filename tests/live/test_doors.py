"""The CLI and the SDK over the same cluster: every list as JSON, every object in a notebook."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import raytide as rt
from raytide.control.embedded import LocalCluster
from raytide.core.job import JobState
from raytide.core.train_spec import TrainSpec

pytestmark = pytest.mark.cluster

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


LISTS = ["status", "cost", "ps", "serve", "autoscaler explain", "autoscaler --dry-run", "simulate --from-live"]


@pytest.mark.parametrize("command", [tuple(command.split()) for command in LISTS])
def test_every_list_is_also_json(raytide_cli: Cli, command: tuple[str, ...]) -> None:
    done = raytide_cli(*command, "--json")
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)
    assert raytide_cli(*command).returncode == 0


def test_a_process_of_the_users_enters_ray_with_what_the_status_says(live: LocalCluster) -> None:
    code = (
        "import os, raytide as rt; os.environ.update(rt.connect().status().ray_environment);"
        " import ray; ray.init(log_to_driver=False); print('nodes', len(ray.nodes()) > 0)"
    )
    environment = {name: value for name, value in live.environment().items() if not name.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert "nodes True" in done.stdout, done.stderr[-2000:]


def test_a_run_is_followed_stopped_and_resumed_without_losing_a_step(
    tide: rt.Tide, train_spec: Callable[..., TrainSpec], raytide_cli: Cli, eventually: Callable[..., None]
) -> None:
    spec = train_spec(steps=400, checkpoint_every=5)
    run = tide.train(spec)
    eventually(lambda: int(run.refresh().progress.get("step", 0)) >= 6)
    assert "lease-" in run._repr_html_() or run.id in run._repr_html_()
    stopped = raytide_cli("stop", run.id)
    assert stopped.returncode == 0, stopped.stderr
    eventually(lambda: run.refresh().state is JobState.STOPPED)

    steps = int(run.metrics()[-1]["step"]) + 10
    resumed = tide.train(spec.model_copy(update={"steps": steps}))
    resumed.wait(timeout_s=120.0)
    assert Path(str(resumed.output()), "config.json").is_file()
    assert [line["step"] for line in resumed.metrics()] == list(range(1, steps + 1))
    assert resumed.result().steps == steps
    assert raytide_cli("why", run.id).stdout.startswith(f"{run.id} is stopped")
