"""The commands `key` and `usage`. `key` manages the API keys of the gateway. `usage` shows the requests that were made
with the keys.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from raytide.cli.options import finite, parse_limit
from raytide.cli.show import ClusterName, Json, as_json, as_list, as_result, as_table, local_time
from raytide.cli.tenancy.money import seconds
from raytide.control.client import ApiClient
from raytide.control.views import KeyView, NewKey
from raytide.core.money import format_usd
from raytide.core.objects.api_key import ApiKey, KeyBudget, KeySpec, UsageBy, UsageRow, UsageSum

_FACTORS = {"k": 10**3, "M": 10**6, "G": 10**9}
KeyId = Annotated[str, typer.Argument(help="The id of a key, such as key-7.")]

key = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Manage the API keys of the gateway.")


@key.command()
def create(
    name: Annotated[str, typer.Argument(help="What the key is for.")],
    team: Annotated[str | None, typer.Option(help="Its team; the one of your token by default.")] = None,
    models: Annotated[
        list[str] | None,
        typer.Option("--model", help="An endpoint, or NAME:ADAPTER, that it may use; repeat it. All by default."),
    ] = None,
    expires: Annotated[str | None, typer.Option(help="The time after which it ends: 12h, 30d.")] = None,
    rpm: Annotated[str | None, typer.Option(help="The most requests a minute: 600, 20k.")] = None,
    tpm: Annotated[str | None, typer.Option(help="The most tokens a minute, of prompts and answers: 200k, 1M.")] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="USD[/month]", help="The most that it may cost in total, or each month.")
    ] = None,
    priority: Annotated[
        int, typer.Option(min=-100, max=100, help="The priority of its requests; lower is more urgent.")
    ] = 0,
    answer_cache: Annotated[
        bool, typer.Option("--answer-cache", help="Keep exact answers, where an endpoint has an answer_cache.")
    ] = False,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Create a key and print its secret, which cannot be shown again."""
    fields: dict[str, object] = {"name": name, "models": models or (), "priority": priority}
    fields["answer_cache"] = answer_cache
    fields |= {"requests_per_min": rpm and _count(rpm), "tokens_per_min": tpm and _count(tpm)}
    if team is not None:
        fields["team"] = team
    if expires is not None:
        fields["expires_in_s"] = seconds(expires)
    if budget is not None:
        usd, per = parse_limit(budget)
        fields["budget"] = KeyBudget(usd=usd, per="month" if per == "month" else "life")
    _show_new(ApiClient.find(cluster).create_key(KeySpec.parse(fields, where="key")), json)


@key.command("list")
def list_keys(
    ended: Annotated[bool, typer.Option("--all", help="Include keys that were revoked or have expired.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The number of keys, newest first.")] = 100,
    offset: Annotated[int, typer.Option(min=0, help="The number of keys to skip.")] = 0,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """List the keys of your team, with what they have spent."""
    head = ("KEY", "NAME", "TEAM", "USER", "STATE", "MODELS", "RPM", "TPM", "BUDGET", "THIS MONTH", "TOTAL", "RESERVED")
    as_list(ApiClient.find(cluster).keys(limit=limit, offset=offset, ended=ended), head, _row, json)


@key.command()
def show(key_id: KeyId, cluster: ClusterName = None, json: Json = False) -> None:
    """Show a key: its limits, and what it has spent."""
    view = ApiClient.find(cluster).key(key_id)
    if json:
        as_json(view)
        return
    shown = view.key
    fields = {
        **_facts(view),
        "priority": shown.priority,
        "keeps answers": "yes" if shown.answer_cache else "no",
        "created": local_time(shown.created_at_s),
        "expires": "-" if shown.expires_at_s is None else local_time(shown.expires_at_s),
    }
    as_table(("KEY", shown.id), fields.items())


@key.command()
def rotate(
    key_id: KeyId,
    grace: Annotated[str, typer.Option(help="How long the old key stays valid: 0m, 12h, 7d.")] = "1d",
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Replace a key by one with the same limits and budget, and print the new secret."""
    _show_new(ApiClient.find(cluster).rotate_key(key_id, grace_s=seconds(grace)), json)


@key.command()
def revoke(key_id: KeyId, cluster: ClusterName = None, json: Json = False) -> None:
    """Revoke a key at once."""
    view = ApiClient.find(cluster).revoke_key(key_id)
    as_result(view, f"{view.key.id} ({view.key.name}) is revoked", json)


def usage(
    by: Annotated[UsageBy, typer.Option(help="The grouping.")] = "key",
    requests: Annotated[bool, typer.Option("--requests", help="List single requests, newest first.")] = False,
    key_id: Annotated[str | None, typer.Option("--key", help="Only requests with this key.")] = None,
    team: Annotated[str | None, typer.Option(help="Only requests of this team.")] = None,
    user: Annotated[str | None, typer.Option(help="Only requests with keys of this user.")] = None,
    model: Annotated[str | None, typer.Option(help="Only requests to this endpoint.")] = None,
    since: Annotated[str, typer.Option(help="Only requests of this last time: 12h, 30d; all if empty.")] = "30d",
    limit: Annotated[int, typer.Option(min=1, help="The most single requests.")] = 100,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Show the tokens and cost of the gateway's requests, summed by key or by another group."""
    client = ApiClient.find(cluster)
    since_s = time.time() - seconds(since) if since else None
    which = {"key": key_id, "team": team, "user": user, "model": model, "since_s": since_s}
    if requests:
        _show_requests(client, which, limit, json)
        return
    head = (by.upper(), "REQUESTS", "ERRORS", "PROMPT", "CACHED", "COMPLETION", "COST")
    as_list(client.usage_sums(by, **which), head, _sum_row, json)


def _count(text: str) -> int:
    """Returns the number that a text such as `200k` or `1.5M` names. Raises UsageError for other texts."""
    factor = _FACTORS.get(text[-1:], 1)
    number = finite(text[:-1] if factor > 1 else text, f"{text} is not a number.", "Write 600, 200k or 1.5M.")
    return round(number * factor)


def _show_requests(client: ApiClient, which: dict[str, str | float | None], limit: int, json: bool) -> None:
    shown: list[UsageRow] = []
    before: int | None = None
    while len(shown) < limit:
        page = client.usage(before=before, limit=min(1000, limit - len(shown)), **which)
        shown += page.rows
        if (before := page.before) is None:
            break
    head = ("AT", "REQUEST", "KEY", "TEAM", "MODEL", "STATUS", "PROMPT", "CACHED", "COMPLETION", "COST")
    as_list(shown, head, _request_row, json)


def _sum_row(each: UsageSum) -> tuple[object, ...]:
    return (each.group or "-", each.requests, each.errors, *_tokens_and_cost(each))


def _request_row(row: UsageRow) -> tuple[object, ...]:
    return (local_time(row.at_s), row.id, row.key or "-", row.team, row.model, row.status, *_tokens_and_cost(row))


def _tokens_and_cost(used: UsageRow | UsageSum) -> tuple[object, ...]:
    return (used.prompt_tokens, used.cached_tokens, used.completion_tokens, format_usd(used.cost_micro_usd))


def _show_new(made: NewKey, json: bool) -> None:
    about = f"{made.key.id} ({made.key.name}) of team {made.key.team}"
    as_result(made, f"{about}. Keep the secret: it cannot be shown again.\n{made.secret}", json)


def _row(view: KeyView) -> tuple[object, ...]:
    return (view.key.id, *_facts(view).values())


def _facts(view: KeyView) -> dict[str, object]:
    """Returns the columns that both `key list` and `key show` print for a key."""
    shown, spending = view.key, view.spending
    return {
        "name": shown.name,
        "team": shown.team,
        "user": shown.user,
        "state": _state(shown),
        "models": ", ".join(shown.models) or "all",
        "requests/min": _limit(shown.requests_per_min),
        "tokens/min": _limit(shown.tokens_per_min),
        "budget": _budget(shown),
        "this month": format_usd(spending.month),
        "total": format_usd(spending.life),
        "reserved": format_usd(spending.reserved),
    }


def _state(shown: ApiKey) -> str:
    if shown.revoked_at_s is not None:
        return "revoked"
    if not shown.is_valid(time.time()):
        return f"replaced by {shown.replaced_by}" if shown.replaced_by else "expired"
    return f"until {local_time(shown.expires_at_s)}" if shown.expires_at_s is not None else "valid"


def _limit(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _budget(shown: ApiKey) -> str:
    if shown.budget_micro_usd is None:
        return "-"
    return f"{format_usd(shown.budget_micro_usd)}{'/month' if shown.budget_per == 'month' else ''}"
