"""cost, quota and budget: what is shown of money and limits, and by whom they were set."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from raytide.cli.app import app
from raytide.cli.options import parse_limit
from raytide.cli.tenancy import money
from raytide.control.client import ApiClient
from raytide.control.views import ClusterStatus, CostLine, CostReport, CostTable, JobView, TeamUse, TeamView
from raytide.core.errors import UsageError
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.core.objects.node import CapacityType, Node, NodeState
from raytide.core.objects.team import TeamSpec
from raytide.ledger.report import CostRow

runner = CliRunner()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ApiClient, "find", lambda _: ApiClient("http://127.0.0.1:1", ""))


@pytest.mark.usefixtures("client")
def test_costs_name_what_work_was_lost_to(monkeypatch: pytest.MonkeyPatch) -> None:
    row = CostRow("job-1", 3_000_000, 1_000_000, 0, 1_000_000, ("job-7", "node-4"))
    table = CostTable("job", (row, CostRow("(idle)", 2_000_000, 0, 0)), 5_000_000, 0)
    monkeypatch.setattr(ApiClient, "costs", lambda *_, **__: table)
    lines = runner.invoke(app, ["cost", "--by", "job", "--csv"]).stdout.splitlines()
    assert lines == [
        "job,cost,per_hour,lost,lost_to",
        "job-1,3.000000,1.000000,1.000000,job-7 node-4",
        "(idle),2.000000,0.000000,0.000000,-",
        "total,5.000000,1.000000,1.000000,-",
    ]


@pytest.mark.usefixtures("client")
def test_costs_have_energy_and_emissions_where_some_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    row = CostRow("job-1", 3_000_000, 0, 0, energy_mj=5_400_000_000)
    table = CostTable("job", (row, CostRow("(idle)", 0, 0, 0)), 3_000_000, 0, grams_co2_per_kwh=400.0)
    monkeypatch.setattr(ApiClient, "costs", lambda *_, **__: table)
    lines = runner.invoke(app, ["cost", "--by", "job", "--csv"]).stdout.splitlines()
    assert [line.split(",")[-2:] for line in lines] == [
        ["kwh", "co2_kg"], ["1.500", "0.600"], ["0.000", "0.000"], ["1.500", "0.600"],
    ]  # fmt: skip


@pytest.mark.usefixtures("client")
def test_limits_say_whether_the_file_still_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    use = TeamUse({}, {}, {}, 0, 0.0)
    teams = [
        TeamView("blue", TeamSpec(quota={"GPU": 8.0}), 0, use, ("quota",)),
        TeamView("red", TeamSpec(quota={"GPU": 4.0}), 0, use, ("budget",)),
    ]
    monkeypatch.setattr(ApiClient, "teams", lambda _: teams)
    for command, by in (("quota", {"blue"}), ("budget", {"red"})):
        for line in runner.invoke(app, [command]).stdout.splitlines()[1:]:
            shown = f"raytide {command}" if line.split()[0] in by else "cluster.yaml"
            assert line.rstrip().endswith(shown), line


@pytest.mark.parametrize(
    ("said", "expected"),
    [("500", (500.0, "job")), ("1.5/month", (1.5, "month")), ("0/month", (0.0, "month"))],
)
def test_a_budget_is_dollars_in_all_or_a_month(said: str, expected: tuple[float, str]) -> None:
    assert parse_limit(said) == expected


@pytest.mark.parametrize(
    "said", ["", "/month", "5/", "5/week", "5/Month", "5 per month", "$5", "-1", "nan/month", "inf"]
)
def test_what_is_no_budget_is_refused(said: str) -> None:
    with pytest.raises(UsageError, match="is not a budget"):
        parse_limit(said)


@pytest.mark.parametrize("text", ["9" * 400 + "d", "1e9d", "-1d", "nan", ""])
def test_what_is_no_duration_is_refused(text: str) -> None:
    assert money.seconds("1.5h") == 5400.0
    with pytest.raises(UsageError, match="is not a duration"):
        money.seconds(text)


@pytest.mark.usefixtures("client")
def test_jobs_with_budgets_of_their_own_are_listed_with_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def view(number: int, month: int | None, **budget: object) -> JobView:
        gang = GangSpec(shapes=(Shape(resources={"CPU": 1.0}),))
        spec = JobSpec.parse({"kind": "train", "name": "j", "gang": gang, **budget}, where="job")
        job = Job(f"job-{number}", spec, "ana", JobState.RUNNING, 0.0)
        return JobView(job, None, 9_000_000, 0, month_micro_usd=month)

    found = [view(1, None), view(2, None, budget_usd=50), view(3, 1_000_000, soft_budget_usd=5, budget_per="month")]
    monkeypatch.setattr(ApiClient, "teams", lambda _: [])
    monkeypatch.setattr(ApiClient, "jobs", lambda *_, active, **__: found if active else [])
    lines = [line.split() for line in runner.invoke(app, ["budget"]).stdout.splitlines() if line.startswith("job-")]
    assert lines == [
        ["job-2", "j", "default", "job", "-", "$50.00", "$9.00"],
        ["job-3", "j", "default", "month", "$5.00", "-", "$1.00"],
    ]


@pytest.mark.usefixtures("client")
def test_jobs_with_budgets_are_found_among_however_many(monkeypatch: pytest.MonkeyPatch) -> None:
    gang = GangSpec(shapes=(Shape(resources={"CPU": 1.0}),))
    spec = JobSpec(kind=JobKind.TRAIN, name="j", gang=gang, budget_usd=50)
    found = [JobView(Job(f"job-{at}", spec, "ana", JobState.RUNNING, 0.0), None, 0, 0) for at in range(5)]
    monkeypatch.setattr(money, "_PAGE", 2)
    monkeypatch.setattr(ApiClient, "teams", lambda _: [])
    monkeypatch.setattr(ApiClient, "jobs", lambda _, limit, active, offset=0: found[offset : offset + limit])
    assert runner.invoke(app, ["budget"]).stdout.count("job-") == 5


@pytest.mark.usefixtures("client")
def test_a_reset_gives_the_file_its_say_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []
    monkeypatch.setattr(ApiClient, "change_team", lambda _, name, **changes: (asked.append(changes), TeamSpec())[1])
    assert runner.invoke(app, ["quota", "reset", "red"]).exit_code == 0
    assert runner.invoke(app, ["budget", "reset", "red"]).exit_code == 0
    assert asked == [dict.fromkeys(("quota", "borrow", "lend", "weight")), {"budget": None}]


def test_costs_and_status_show_themselves_in_a_notebook_and_as_json() -> None:
    report = CostReport((CostLine("waste", "job-3", "blue", 2_000_000),), 2_000_000, 0, 0, 0)
    assert "<td>job-3</td><td>blue</td><td>$2.00</td>" in report._repr_html_()
    assert report.json()["lines"][0]["subject"] == "job-3"
    node = Node("node-1", "h100x8", "a", CapacityType.SPOT, 1, NodeState.READY, 0.0)
    status = ClusterStatus(
        "mine", 1.0, 0.1, (node,), {"queued": 2}, 1, 3_000_000, 0, "http://ray", {}, "", ("no <Ray>",)
    )
    shown = status._repr_html_()
    assert "h100x8 in a: ready" in shown and "2 queued" in shown and "no &lt;Ray&gt;" in shown
    assert status.json()["nodes"][0]["id"] == "node-1"
