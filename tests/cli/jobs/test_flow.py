"""flow run, show, resume and list, on an API in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.workflows.fake_api import FakeApi
from typer.testing import CliRunner

from raytide.cli.app import app
from raytide.cli.jobs.flow import value_of
from raytide.control.client import ApiClient
from raytide.core.clock import VirtualClock
from raytide.core.errors import ConfigError, ConflictError, NotFoundError, UsageError
from raytide.core.objects.job import JobState
from raytide.sdk.client import Client
from raytide.sdk.jobs.flow_run import FlowRun
from raytide.workflows.driver import FlowDriver

runner = CliRunner()
FLOW = """
name: two
out: {out}
params: {{size: 3}}
stages:
  first: {{kind: script, spec: {{command: [echo, "${{params.size}}"]}}}}
  second: {{kind: script, when: first.size > 2, spec: {{command: [echo, "${{first.out}}"]}}}}
"""


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    made = FakeApi()
    monkeypatch.setattr(ApiClient, "find", lambda name=None: made)
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    path = tmp_path / "work" / "flow.yaml"
    path.write_text(FLOW.format(out=tmp_path / "out"))
    return path


def drive(api: FakeApi, job: str = "job-1") -> int | None:
    """Does what the process of the flow's job would do."""
    run = Client(api).job(job)
    assert isinstance(run, FlowRun)
    return FlowDriver(run.flow, run.run, job, api, VirtualClock(1000.0), say=lambda line: None).tick()


def cli(*args: str) -> str:
    done = runner.invoke(app, ["flow", *args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_flow_is_submitted_shown_listed_and_resumed(api: FakeApi, file: Path, tmp_path: Path) -> None:
    assert "job-1 is queued" in cli("run", str(file), "--set", "size=4", "--no-wait")
    assert "digest" in api.packages
    drive(api)
    assert api.jobs_by_id["job-2"].spec.config["command"] == ["echo", "4"]
    api.end("job-2", size=1.0)
    assert drive(api) == 0
    shown = cli("show", "two", "--graph", str(tmp_path / "g.svg"))
    assert "second\tscript\tskipped" in shown
    assert "first.size is 1, and the condition is first.size > 2" in shown
    assert (tmp_path / "g.svg").read_text().startswith("<svg")
    assert [view["status"] for view in json.loads(cli("show", "job-1", "--json"))] == ["done", "skipped"]
    assert "job-1\ttwo\tqueued\t1 skipped, 1 done" in cli("list")

    with pytest.raises(ConflictError, match="job-1 is queued: it needs no resume"):
        cli("resume", "two")
    api.end("job-1", JobState.FAILED)
    assert "job-3 is queued" in cli("resume", "job-1", "--no-wait")
    first, again = Client(api).job("job-1"), Client(api).job("job-3")
    assert isinstance(first, FlowRun)
    assert isinstance(again, FlowRun)
    assert first.run == again.run
    drive(api, "job-3")
    assert [view.status for view in again.refresh().stages()] == ["done", "skipped"]


def test_waiting_prints_each_change_and_a_failed_flow_is_exit_code_1(api: FakeApi, file: Path) -> None:
    cli("run", str(file), "--no-wait")
    drive(api)
    api.end("job-2", JobState.FAILED, "no space")
    drive(api)
    progress = dict(api.jobs_by_id["job-1"].progress)
    api.end("job-1", JobState.FAILED)
    api.report("job-1", progress)
    api.retry = lambda job_id, key=None: api.job(job_id)  # type: ignore[method-assign]
    done = runner.invoke(app, ["flow", "resume", "two"], catch_exceptions=False)
    assert done.exit_code == 1
    assert "first failed: job-2: job-2 failed: no space" in done.output
    assert "second skipped: first failed: job-2 failed: no space" in done.output
    assert "`raytide flow resume job-1` goes on" in done.output


def test_what_is_wrong_is_said_before_anything_is_submitted(api: FakeApi, file: Path) -> None:
    with pytest.raises(NotFoundError, match="has no parameter sise"):
        cli("run", str(file), "--set", "sise=4")
    file.write_text(file.read_text().replace("first.size", "third.size"))
    with pytest.raises(ConfigError, match="stage second needs third, and there is no stage third"):
        cli("run", str(file))
    assert api.jobs_by_id == {}
    job = api.add()
    with pytest.raises(UsageError, match=f"{job} is no workflow"):
        cli("show", job)
    with pytest.raises(NotFoundError, match="is a workflow two"):
        cli("show", "two")


def test_a_notebook_shows_the_stages_and_the_graph(api: FakeApi, file: Path) -> None:
    run = Client(api).flow(file, params={"size": 5})
    html = run._repr_html_()
    assert "flow two (job-1, queued)" in html
    assert "<svg" in html
    assert run.flow.params == {"size": 5}
    assert repr(run) == "FlowRun(job-1, two, queued)"
    with pytest.raises(NotFoundError, match="job-1 has no stage third"):
        run.stage("third")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("-1.5e-3", -1.5e-3),
        ("true", True),
        ("'7'", "7"),
        ("0123456", "0123456"),
        ("14:03", "14:03"),
        ("*.md", "*.md"),
        ("@latest", "@latest"),
        ("fix: a: b", "fix: a: b"),
        ("fix bug #12", "fix bug #12"),
        ("2026-11-31", "2026-11-31"),
        ("", ""),
    ],
)
def test_only_decimal_numbers_are_numbers(text: str, value: object) -> None:
    assert value_of(text) == value
    assert type(value_of(text)) is type(value)
