"""Workflows on a real cluster: from text to a gated endpoint, killed at each stage, and a failing gate."""

from __future__ import annotations

import signal
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import raytide as rt
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.core.errors import NotFoundError, RaytideError
from raytide.core.objects.endpoint import EndpointState
from raytide.core.objects.job import JobState
from raytide.sdk.jobs.flow_run import FlowRun

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]
TIMEOUT_S = 900.0
STDLIB = Path(sysconfig.get_path("stdlib"))


@pytest.fixture(autouse=True)
def deleted(tide: rt.Client, eventually: Callable[..., None]) -> Iterator[None]:
    """Deletes the flows' endpoint: tests of the same cluster need all of its nodes."""
    yield
    with suppress(NotFoundError):
        handle = tide.endpoint("flow-model")
        handle.delete()
        eventually(lambda: handle.refresh().status.endpoint.state is EndpointState.DELETED)


def flow_file(out: Path, **changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a flow from text to an endpoint; `changes` replace fields of stages."""
    tokenizer = {"train": {"vocab_size": 512, "sample_documents": 50}}
    stages: dict[str, dict[str, Any]] = {
        "text": {
            "kind": "data",
            "spec": {
                "inputs": [str(STDLIB / "json"), str(STDLIB / "email")],
                "include": [".py"],
                "tokenizer": tokenizer,
            },
        },
        "unseen": {
            "kind": "data",
            "spec": {"inputs": [str(STDLIB / "ast.py")], "tokenizer": {"file": "${text.out}/tokenizer.json"}},
        },
        "train": {
            "kind": "train",
            "spec": {
                "dataset": "${text.out}",
                "model": {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 1, "max_seq_len": 128},
                "optim": {"lr": 1e-2, "warmup_steps": 2},
                "steps": "${params.steps}",
                "global_batch": 8,
                "seq_len": 64,
                "checkpoint_every": 10,
            },
        },
        "eval": {
            "kind": "eval",
            "spec": {"model": "${train.model}", "dataset": "${unseen.out}", "seq_len": 64, "max_sequences": 64},
        },
        "register": {
            "kind": "register",
            "when": "eval.loss < 6.3",
            "spec": {
                "name": "flow-model",
                "model": "${train.model}",
                "job": "${train.job}",
                "metrics": {"eval_loss": "${eval.metrics.loss}"},
            },
        },
        "serve": {
            "kind": "serve",
            "spec": {"name": "flow-model", "model": "${register.reference}", "resources": {"CPU": 1}},
            "rule": {"eval_loss": {"better": "lower", "gain": 0.0}},
        },
    }
    stages = {name: {**stage, **changes.get(name, {})} for name, stage in stages.items()}
    return {"name": "text-to-endpoint", "out": str(out), "params": {"steps": 30}, "stages": stages}


def driver_processes(run: FlowRun) -> list[psutil.Process]:
    """Returns the processes of a flow's driver on its node."""
    found = []
    for process in psutil.process_iter():
        try:
            if "raytide.workflows.driver" in process.cmdline() and process.environ().get("RAYTIDE_FLOW_RUN") == run.run:
                found.append(process)
        except psutil.Error:
            continue
    return found


def stage_jobs(tide: rt.Client, run: FlowRun) -> dict[str, list[Any]]:
    """Returns the jobs of each stage that were submitted after the flow."""
    since_s = run.view.job.submitted_at_s
    found: dict[str, list[Any]] = {}
    for each in tide.jobs(limit=200):
        job = each.view.job
        if (
            job.submitted_at_s >= since_s
            and job.spec.labels.get("flow") == run.flow.name
            and "stage" in job.spec.labels
        ):
            found.setdefault(job.spec.labels["stage"], []).append(job)
    return found


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flow")


def test_a_flow_killed_at_each_stage_goes_on_and_does_no_stage_twice(
    tide: rt.Client, out: Path, live: LocalCluster
) -> None:
    run = tide.flow(flow_file(out))
    killed: set[str] = set()
    deadline = time.monotonic() + TIMEOUT_S
    while not run.refresh().view.job.is_final:
        assert time.monotonic() < deadline, [view.row() for view in run.stages()]
        for view in run.stages():
            if view.status == "running" and view.name not in killed:
                for process in driver_processes(run):
                    with suppress(psutil.NoSuchProcess):  # a driver that was killed before may end only now
                        process.send_signal(signal.SIGKILL)
                        killed.add(view.name)
        time.sleep(0.1)
    assert run.state is JobState.SUCCEEDED, (run.view.job.reason, [view.row() for view in run.stages()])
    assert {"text", "train", "eval", "serve"} <= killed, killed
    assert [view.status for view in run.stages()] == ["done"] * 6

    jobs = stage_jobs(tide, run)
    assert {name: len(found) for name, found in jobs.items()} == {"text": 1, "unseen": 1, "train": 1, "eval": 1}
    assert all(job.state is JobState.SUCCEEDED for found in jobs.values() for job in found)
    versions = tide.client.model_versions("flow-model")
    assert [version.version for version in versions] == [1]
    assert versions[0].spec.lineage.job == jobs["train"][0].id
    assert 2.0 < versions[0].spec.metrics["eval_loss"] < 6.3
    assert len(tide.client.revisions("flow-model")) == 1
    answer = tide.endpoint("flow-model").openai().completions.create(model="flow-model", prompt="def", max_tokens=4)
    assert answer.choices[0].text
    assert "<svg" in run._repr_html_()


@pytest.mark.soak
def test_a_flow_that_ran_before_is_cached_and_a_failing_gate_leaves_the_old_version_serving_until_a_better_one(
    tide: rt.Client, out: Path, eventually: Callable[..., None]
) -> None:
    tide.flow(flow_file(out)).wait(timeout_s=TIMEOUT_S)
    before = tide.endpoint("flow-model").status
    worse = tide.flow(flow_file(out), params={"steps": 3}).wait(timeout_s=TIMEOUT_S)
    states = {view.name: view for view in worse.stages()}
    assert {name for name, view in states.items() if view.is_cached} == {"text", "unseen"}
    assert states["train"].status == states["eval"].status == "done"
    refused = "serve" if states["register"].status == "done" else "register"
    assert states["serve"].status == "skipped"
    assert "eval" in states[refused].why
    now = tide.endpoint("flow-model").status
    assert now.endpoint.spec.version == before.endpoint.spec.version == "flow-model:1"
    eventually(lambda: tide.endpoint("flow-model").status.ready_replicas >= 1)
    assert len(tide.client.revisions("flow-model")) == 1

    better = tide.flow(flow_file(out), params={"steps": 60}).wait(timeout_s=TIMEOUT_S)
    assert better.stage("serve").status == "done"
    assert tide.endpoint("flow-model").status.endpoint.spec.version == "flow-model:3"
    since_s = tide.client.revisions("flow-model")[0].at_s

    def is_replaced() -> bool:
        startups = tide.endpoint("flow-model").status.startups
        return any(start.is_ready and start.ordered_at_s >= since_s for start in startups)

    eventually(is_replaced)


@pytest.mark.soak
def test_a_stage_that_fails_says_why_and_a_resume_does_only_what_is_left(
    tide: rt.Client, tmp_path: Path, out: Path
) -> None:
    (tmp_path / "work.py").write_text(
        "import json, os, pathlib, sys\n"
        "out = pathlib.Path(os.environ['RAYTIDE_STAGE_OUT']); out.mkdir(parents=True, exist_ok=True)\n"
        "(out / 'metrics.json').write_text(json.dumps({'size': 3.5}))\n"
        "is_broken = 'fails' in sys.argv and not pathlib.Path(sys.argv[-1]).exists()\n"
        "sys.exit('the disk of cards is full' if is_broken else 0)\n"
    )
    fixed = tmp_path / "fixed"
    stages = {
        "first": {"kind": "script", "spec": {"command": ["python", "work.py"]}},
        "second": {
            "kind": "script",
            "needs": ["first"],
            "spec": {"command": ["python", "work.py", "fails", str(fixed)]},
        },
        "third": {"kind": "script", "spec": {"command": ["python", "work.py"]}, "when": "second.size > 3"},
    }
    flow = {"name": "scripts", "out": str(tmp_path / "out"), "stages": stages}
    run = tide.flow(flow, working_dir=tmp_path)
    with pytest.raises(RaytideError, match=r"(?s)second failed: job-.* failed: .*the disk of cards is full"):
        run.wait(timeout_s=TIMEOUT_S)
    assert [view.status for view in run.stages()] == ["done", "failed", "skipped"]
    assert "second failed" in run.stage("third").why
    fixed.touch()
    again = run.resume().wait(timeout_s=TIMEOUT_S)
    assert [view.status for view in again.stages()] == ["done", "done", "done"]
    counts = Counter(job.spec.labels["stage"] for found in stage_jobs(tide, run).values() for job in found)
    assert counts == {"first": 1, "second": 2, "third": 1}


def test_stopping_a_flow_stops_its_stages(tide: rt.Client, tmp_path: Path, eventually: Callable[..., None]) -> None:
    stages = {"long": {"kind": "script", "spec": {"command": ["sleep", "600"]}}}
    run = tide.flow({"name": "long", "out": str(tmp_path / "out"), "stages": stages}, working_dir=tmp_path)
    eventually(lambda: run.refresh().stage("long").job)
    stage = tide.job(run.stage("long").job)
    eventually(lambda: stage.refresh().state is JobState.RUNNING)
    run.stop()
    eventually(lambda: run.refresh().state is JobState.STOPPED)
    eventually(lambda: stage.refresh().state is JobState.STOPPED)
