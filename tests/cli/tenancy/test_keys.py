"""key, usage and audit: the requests that the options become, and what is shown."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from raytide.cli.app import app
from raytide.control.client import ApiClient
from raytide.control.views import KeyView, NewKey, UsagePage
from raytide.core.objects.api_key import (
    ApiKey,
    AuditEntry,
    ChainVerdict,
    KeyBudget,
    KeySpec,
    KeySpending,
    UsageRow,
    UsageSum,
)

runner = CliRunner()
KEY = ApiKey("key-1", "web", "blue", "ana", "key-1", requests_per_min=600, budget_micro_usd=5_000_000)
ROW = UsageRow("r1", 5.0, "key-1", "blue", "ana", "chat", "", 10, 4, 3, 1_500_000, 0, 200)


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ApiClient, "find", lambda _: ApiClient("http://127.0.0.1:1", ""))


def test_a_key_has_the_limits_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[KeySpec] = []

    def create(_: ApiClient, spec: KeySpec) -> NewKey:
        asked.append(spec)
        return NewKey(KEY, "rk-secret")

    monkeypatch.setattr(ApiClient, "create_key", create)
    options = ["--team", "blue", "--model", "chat", "--model", "code", "--expires", "30d", "--rpm", "600"]
    done = runner.invoke(app, ["key", "create", "web", *options, "--tpm", "200k", "--budget", "100/month"])
    assert done.stdout.splitlines()[-1] == "rk-secret"
    assert asked[0] == KeySpec(
        name="web",
        team="blue",
        models=("chat", "code"),
        expires_in_s=30 * 86400.0,
        requests_per_min=600,
        tokens_per_min=200_000,
        budget=KeyBudget(usd=100, per="month"),
    )
    assert "a number" in str(runner.invoke(app, ["key", "create", "web", "--rpm", "many"]).exception)
    runner.invoke(app, ["key", "create", "web", "--budget", "7", "--answer-cache"])
    assert [each.answer_cache for each in asked] == [False, True]
    assert asked[1].budget == KeyBudget(usd=7, per="life")
    assert "team" not in asked[1].model_fields_set  # the token's
    assert json.loads(runner.invoke(app, ["key", "create", "web", "--json"]).stdout)["secret"] == "rk-secret"


def test_keys_are_listed_shown_rotated_and_revoked(monkeypatch: pytest.MonkeyPatch) -> None:
    view = KeyView(KEY, KeySpending(1_000_000, 2_000_000, 3_000_000))
    monkeypatch.setattr(ApiClient, "keys", lambda *_, **__: [view])
    monkeypatch.setattr(ApiClient, "key", lambda *_: view)
    monkeypatch.setattr(ApiClient, "rotate_key", lambda *_, grace_s: NewKey(KEY, f"rk-{grace_s:.0f}"))
    monkeypatch.setattr(ApiClient, "revoke_key", lambda *_: view)
    listed = runner.invoke(app, ["key", "list"]).stdout.splitlines()[1].split("\t")
    assert listed == [
        *("key-1", "web", "blue", "ana", "valid", "all", "600", "-", "$5.00/month"),
        *("$1.00", "$2.00", "$3.00"),
    ]
    assert "requests/min\t600" in runner.invoke(app, ["key", "show", "key-1"]).stdout
    assert runner.invoke(app, ["key", "rotate", "key-1", "--grace", "2h"]).stdout.splitlines()[-1] == "rk-7200"
    assert runner.invoke(app, ["key", "revoke", "key-1"]).stdout == "key-1 (web) is revoked\n"


def test_usage_is_summed_or_listed_over_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def usage(_: ApiClient, **query: object) -> UsagePage:
        asked.append(query)
        return UsagePage((ROW,), 7 if len(asked) == 1 else None)

    sums = [UsageSum("blue", 3, 1, 10, 4, 3, 1_500_000)]
    monkeypatch.setattr(ApiClient, "usage_sums", lambda *_, **__: sums)
    monkeypatch.setattr(ApiClient, "usage", usage)
    shown = runner.invoke(app, ["usage", "--by", "team"]).stdout.splitlines()
    assert shown == ["TEAM\tREQUESTS\tERRORS\tPROMPT\tCACHED\tCOMPLETION\tCOST", "blue\t3\t1\t10\t4\t3\t$1.50"]
    lines = runner.invoke(app, ["usage", "--requests", "--key", "key-1", "--since", ""]).stdout.splitlines()
    assert len(lines) == 3
    assert [(query["before"], query["limit"], query["key"], query["since_s"]) for query in asked] == [
        (None, 100, "key-1", None),
        (7, 99, "key-1", None),
    ]


def test_a_broken_log_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = AuditEntry(4, 5.0, "ana", "key.create", "key-1", {"name": "web"}, "aa", "bb")
    monkeypatch.setattr(ApiClient, "audit", lambda *_, **__: [entry])
    assert "4\t" in runner.invoke(app, ["audit", "list"]).stdout
    monkeypatch.setattr(ApiClient, "verify_audit", lambda *_: ChainVerdict(4, 1, 4, "bb"))
    done = runner.invoke(app, ["audit", "verify"])
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "4:bb")
    monkeypatch.setattr(ApiClient, "verify_audit", lambda *_: ChainVerdict(2, 1, 2, "bb", 3, "it is missing"))
    done = runner.invoke(app, ["audit", "verify"])
    assert (done.exit_code, done.stdout) == (1, "entry 3 is broken: it is missing\n")
