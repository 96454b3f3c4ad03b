"""The commands `audit`, which show the log of all changes and of the gateway's requests, and check its hash chain."""

from __future__ import annotations

import json as json_
import time
from typing import Annotated

import typer

from raytide.cli.show import ClusterName, Json, as_json, as_list, local_time
from raytide.cli.tenancy.money import seconds
from raytide.control.client import ApiClient
from raytide.core.objects.api_key import AuditEntry

audit = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Show or check the audit log.")
_MOST_DETAIL = 200


@audit.command("list")
def list_entries(
    actor: Annotated[str | None, typer.Option(help="Only entries of this user or gateway.")] = None,
    action: Annotated[str | None, typer.Option(help="Only actions that begin so: key., job.submit.")] = None,
    subject: Annotated[str | None, typer.Option("--object", help="Only entries about this object: key-7.")] = None,
    since: Annotated[str, typer.Option(help="Only entries of this last time: 12h, 30d; all if empty.")] = "",
    before: Annotated[int | None, typer.Option(min=1, help="Only entries with lower numbers.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The number of entries, newest first.")] = 50,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """List entries of the audit log, newest first."""
    since_s = time.time() - seconds(since) if since else None
    which = {"actor": actor, "action": action, "object": subject, "since_s": since_s}
    entries = ApiClient.find(cluster).audit(before=before, limit=limit, **which)
    as_list(entries, ("NUMBER", "AT", "ACTOR", "ACTION", "OBJECT", "DETAIL"), _row, json)


def _row(entry: AuditEntry) -> tuple[object, ...]:
    detail = json_.dumps(entry.detail)[:_MOST_DETAIL]
    return (entry.seq, local_time(entry.at_s), entry.actor, entry.action, entry.object, detail)


@audit.command()
def verify(
    head: Annotated[
        str | None, typer.Option(metavar="NUMBER:HASH", help="An entry that an earlier check printed as the last.")
    ] = None,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Check that no entry was changed, removed or moved.

    The exit code is 1 if this happened to an entry. The command prints the last entry. Keep this entry outside the
    cluster: given as --head, it lets a later check detect that the whole log was rewritten.
    """
    verdict = ApiClient.find(cluster).verify_audit(head)
    if json:
        as_json(verdict)
    elif verdict.is_whole:
        print(f"{verdict.entries} entries from {verdict.first_seq} on are whole; the last one is")
        print(f"{verdict.head_seq}:{verdict.head_hash}")
    else:
        print(f"entry {verdict.broken_seq} is broken: {verdict.problem}")
    if not verdict.is_whole:
        raise typer.Exit(1)
