"""`raytide autoscaler` and `raytide simulate --from-live`: what was decided, what would be, and what comes of it."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from tests.simulate.test_live import NOW_S, cluster, job
from typer.testing import CliRunner

from raytide.autoscaler.explain import lines
from raytide.cli.app import app
from raytide.cli.operations.autoscaler import moment
from raytide.control.client import ApiClient
from raytide.core.errors import UsageError
from raytide.core.objects.plan import Plan, Preempt, Shrink, Wait
from raytide.core.objects.snapshot import Snapshot

runner = CliRunner()
NOW = datetime(2026, 5, 1, 14, 0, tzinfo=UTC)


class Stub(ApiClient):
    """Two plans: a deed at 100 s that held until 160 s, a wait from 200 s on."""

    def __init__(self) -> None: ...

    def snapshot(self) -> Snapshot:
        return cluster(jobs=(job(1),))

    def plans(self, *, limit: int = 50, until_s: float | None = None) -> list[dict[str, object]]:
        launch = {"action": "launch", "node_id": "node-1", "node_type": "spot", "zone": "b", "subject": "lease-1"}
        launch |= {"reason": "no room", "cost_micro_usd_h": 920_000}  # type: ignore[dict-item]
        rejected = {"choice": "gpu in a", "reason": "dearer", "extra_micro_usd_h": 2_140_000}
        deed = {**launch, "rejected": [rejected, {"choice": "spot in a", "reason": "none left"}]}
        plans: list[dict[str, object]] = [
            {"at_s": 100.0, "last_at_s": 160.0, "actions": [deed]},
            {
                "at_s": 200.0,
                "last_at_s": 300.0,
                "actions": Plan(200.0, (Wait("job-2", "cap", "no"),)).to_json()["actions"],
            },
        ]
        made = [plan for plan in plans if until_s is None or float(str(plan["at_s"])) <= until_s]
        return made[-limit:]


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ApiClient, "find", lambda name=None: Stub())


def shown(*args: str) -> list[str]:
    done = runner.invoke(app, args)
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def test_explain_names_the_job_that_gives_way() -> None:
    plan = Plan(
        0.0, (Preempt("job-1", "lease-1", 30.0, "job-2 is owed more"), Shrink("job-3", "lease-3", (2, 3), 30.0, "x"))
    )
    preempt, shrink = lines([plan.to_json()])
    assert "preempt    job-1 gives lease-1 back" in preempt
    assert "shrink     job-3 gives back 2 members" in shrink


def test_explain_shows_cost_and_what_was_rejected() -> None:
    first, dearer, gone, wait = shown("autoscaler", "explain")
    assert first.endswith("no room (+$0.92/h)")
    assert dearer.strip() == "not gpu in a: dearer (+$2.14/h)"
    assert gone.strip() == "not spot in a: none left"
    assert "job-2 (cap)" in wait


@pytest.mark.parametrize(
    ("at_s", "says", "count"),
    [
        (130, "the decision in force then:", 4),
        (190, "nothing was to be done then", 4),
        (250, "the decision in force then:", 2),
        (50, "no decision is stored", 1),
    ],
)
def test_explain_at_shows_what_held_at_that_time(at_s: int, says: str, count: int) -> None:
    printed = shown("autoscaler", "explain", "--at", datetime.fromtimestamp(at_s, tz=UTC).isoformat())
    assert printed[0].startswith(says)
    assert len(printed) == count


def test_times_without_a_date_are_the_last_ones_that_were() -> None:
    assert moment("13:59", NOW) == datetime(2026, 5, 1, 13, 59, tzinfo=UTC)
    assert moment("14:00:30", NOW) == datetime(2026, 4, 30, 14, 0, 30, tzinfo=UTC)
    assert moment("15:30+02:00", NOW) == datetime(2026, 5, 1, 13, 30, tzinfo=UTC)
    assert moment("16:30+02:00", NOW) == datetime(2026, 4, 30, 14, 30, tzinfo=UTC)
    assert moment("2026-05-01T15:00:00+02:00", NOW) == datetime(2026, 5, 1, 13, 0, tzinfo=UTC)
    with pytest.raises(UsageError, match="is not a time"):
        moment("noon", NOW)


def test_a_dry_run_prints_the_decision_that_would_be_made_now() -> None:
    assert any("launch     node-8 gpu1" in line for line in shown("autoscaler", "--dry-run"))
    plan = json.loads("\n".join(shown("autoscaler", "--dry-run", "--json")))
    assert plan["at_s"] == NOW_S
    assert [action["action"] for action in plan["actions"]] == ["admit", "launch", "assign"]


def test_looking_ahead_says_when_jobs_start_and_what_it_costs() -> None:
    printed = shown("simulate", "--from-live", "--launch-s", "60", "--hours", "0.5")
    assert any(line.startswith("job-1\ttrain-1\tin 1m") for line in printed)
    assert printed[-1].startswith("$0.00 an hour now, $3.00 at most, $3.00 at the end;")
    told = json.loads("\n".join(shown("simulate", "--from-live", "--json")))
    assert told["price_end_micro_usd_h"] == 3_000_000
    assert told["plans"][0]["actions"][0]["action"] == "admit"


@pytest.mark.parametrize(
    "args", [("autoscaler", "--json"), ("simulate", "--json"), ("autoscaler", "--dry-run", "explain")]
)
def test_a_group_without_a_task_says_what_it_can_do(args: tuple[str, ...]) -> None:
    error = runner.invoke(app, args).exception
    assert isinstance(error, UsageError) and error.hint.startswith(("See ", "Run "))
