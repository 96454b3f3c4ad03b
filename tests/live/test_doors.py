"""The CLI and the SDK over the same cluster: every list as JSON, every object in a notebook."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

import raytide as rt
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.core.errors import LeaseLostError
from raytide.core.io.atomic_file import write_json
from raytide.core.objects.job import JobState
from raytide.core.specs.train import TrainSpec

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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=240)
    assert "nodes True" in done.stdout, done.stderr[-2000:]


TASK = """
import ray
import raytide as rt

@rt.task(cpus=1)
def evaluate(checkpoint):
    return checkpoint, ray.util.get_current_placement_group() is not None

print("evaluated", *evaluate("step 7"))
print("mapped", *[future.result(timeout=240)[0] for future in evaluate.map(["one", "two"])])
"""


def test_a_task_of_a_process_outside_of_ray_runs_on_a_leased_node(live: LocalCluster) -> None:
    environment = {name: value for name, value in live.environment().items() if not name.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", TASK], capture_output=True, text=True, env=environment, timeout=480)
    assert "evaluated step 7 True" in done.stdout, done.stderr[-2000:]
    assert "mapped one two" in done.stdout


HOLD = """
import os, sys, time
import ray
import raytide as rt

ray.init()
with rt.connect() as tide, tide.gang(cpus=1, name="held"):
    print("holds", os.getpid(), flush=True)
    time.sleep(600)
"""


def test_a_killed_driver_under_ray_job_submit_frees_its_lease_after_ten_seconds(
    live: LocalCluster, tide: rt.Client, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    (tmp_path / "hold.py").write_text(HOLD)
    headers, address = live.ray_headers, f"{live.dashboard_url}/api/jobs/"
    body = {"entrypoint": f"exec python {tmp_path}/hold.py"}
    submitted = httpx.post(address, headers=headers, json=body, timeout=60.0).json()

    def said() -> list[str]:
        url = f"{address}{submitted['submission_id']}/logs"
        logs = httpx.get(url, headers=headers, timeout=60.0).json()["logs"] or ""
        return next((line.split() for line in logs.splitlines() if line.startswith("holds")), [])

    eventually(said)
    (run,) = (run for run in tide.jobs() if run.view.job.spec.name == "held")
    pid = int(said()[1])
    os.kill(pid, signal.SIGKILL)
    killed_s = time.time()
    eventually(lambda: run.refresh().view.job.is_final)
    assert "has not asked for its lease for 10 s: dead, or cut off" in run.view.job.reason  # what is promised
    assert run.view.job.ended_at_s - killed_s < 30.0, "and the passes of a controller on a busy machine"
    with pytest.raises(LeaseLostError):
        tide.client.lease(run.id)


def test_a_token_of_one_team_does_nothing_with_anothers_job(
    live: LocalCluster, tide: rt.Client, raytide_cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "x.py").write_text("print('secret')")
    mine = tide.run(tmp_path / "x.py", working_dir=tmp_path).wait(timeout_s=360.0)
    before = live.tokens_file.read_text()
    write_json(live.tokens_file, {**json.loads(before), "theirs": {"user": "bob", "team": "research"}})
    monkeypatch.setenv("RAYTIDE_API", live.api_url)
    monkeypatch.setenv("RAYTIDE_TOKEN", "theirs")
    try:
        run = ("run", "--team", "default", "--working-dir", str(tmp_path), str(tmp_path / "x.py"))
        for command in (run, ("stop", mine.id), ("logs", mine.id), ("why", mine.id), ("retry", mine.id)):
            done = raytide_cli(*command)
            assert (done.returncode, done.stdout) == (1, ""), command
            assert "is for team research, not default" in done.stderr
        assert mine.id not in raytide_cli("ps").stdout
    finally:
        write_json(live.tokens_file, json.loads(before))
    assert mine.refresh().state is JobState.SUCCEEDED


def test_a_run_is_followed_stopped_and_resumed_without_losing_a_step(
    tide: rt.Client, train_spec: Callable[..., TrainSpec], raytide_cli: Cli, eventually: Callable[..., None]
) -> None:
    spec = train_spec(steps=100_000, checkpoint_every=5)  # it does not end before it is stopped
    run = tide.train(spec)
    eventually(lambda: int(run.refresh().progress.get("step", 0)) >= 6)
    assert "lease-" in run._repr_html_() or run.id in run._repr_html_()
    stopped = raytide_cli("stop", run.id)
    assert stopped.returncode == 0, stopped.stderr
    eventually(lambda: run.refresh().state is JobState.STOPPED)

    steps = int(run.metrics()[-1]["step"]) + 10
    resumed = tide.train(spec.model_copy(update={"steps": steps}))
    resumed.wait(timeout_s=360.0)
    assert Path(str(resumed.output()), "config.json").is_file()
    assert [line["step"] for line in resumed.metrics()] == list(range(1, steps + 1))
    assert resumed.result().steps == steps
    assert raytide_cli("why", run.id).stdout.startswith(f"{run.id} is stopped")
