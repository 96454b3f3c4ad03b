"""The commands `alerts`, for alerts and their actions, and `nodes`, for replacing nodes and keeping them out of use."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import typer

from raytide.cli.show import ClusterName, Json, as_json, as_list, as_result, local_time
from raytide.cli.tenancy.money import seconds
from raytide.control.client import ApiClient
from raytide.core.objects.node import Node
from raytide.sdk.jobs.script import pairs_of

alerts = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="Show alerts and what they did, test and silence them."
)
nodes = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="Show nodes, replace them, and keep bad ones out of use."
)
Limit = Annotated[int, typer.Option(min=1, max=1000, help="The number of lines, newest first.")]
NodeId = Annotated[str, typer.Argument(metavar="NODE")]
_YES = {True: "yes", False: "no", None: "-"}
Reason = Annotated[str, typer.Option(help="Shown with the node, and in the audit log.")]


@alerts.command("list")
def list_alerts(
    ended: Annotated[bool, typer.Option("--ended", help="Alerts that are over, too.")] = False,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """List the alerts that fire, and those that are about to fire."""
    found = ApiClient.find(cluster).call("GET", "/v1/alerts")
    shown = [alert for alert in found if ended or alert["state"] != "resolved"]
    as_list(shown, ("STATE", "SEVERITY", "ALERT", "LABELS", "SINCE", "ACTION", "SUMMARY"), _alert_row, json)


@alerts.command()
def history(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]")] = None,
    actions: Annotated[bool, typer.Option("--actions", help="The log of actions instead.")] = False,
    limit: Limit = 50,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Show when alerts fired and ended, or what was done about them."""
    client = ApiClient.find(cluster)
    if actions:
        done = client.call("GET", "/v1/alerts/actions", query={"limit": limit})
        done = [each for each in done if name in (None, each["alert"])]
        as_list(done, ("AT", "ALERT", "ACTION", "OBJECT", "STATE", "OUTCOME"), _action_row, json)
        return
    found = client.call("GET", "/v1/alerts/history", query={"limit": limit, **({"name": name} if name else {})})
    as_list(found, ("AT", "STATE", "ALERT", "LABELS", "SUMMARY"), _transition_row, json)


@alerts.command()
def probes(cluster: ClusterName = None, json: Json = False) -> None:
    """Show whether the last answer to each probe was correct, and how fast the answer was."""
    found = ApiClient.find(cluster).call("GET", "/v1/probes")
    as_list(found, ("ENDPOINT", "PROBE", "ANSWERED", "RIGHT", "SECONDS"), _probe_row, json)


@alerts.command("test")
def fire_test(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of an alert.")],
    label: Annotated[list[str] | None, typer.Option(help="A label of the alert, NAME=VALUE.")] = None,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Fire an alert for a minute: receivers are notified, and actions are dry runs."""
    body = {"name": name, "labels": pairs_of(label or (), "--label")}
    fired = ApiClient.find(cluster).call("POST", "/v1/alerts/test", body)
    text = f"{name} fires for a minute; `raytide alerts history {name} --actions` shows what it would do"
    as_result(fired, text, json)


@alerts.command()
def silence(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of an alert.")],
    duration: Annotated[str, typer.Option("--for", help="How long: 30m, 2h, 7d.")] = "2h",
    lift: Annotated[bool, typer.Option("--lift", help="Ends a silence.")] = False,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Silence an alert: it is still recorded, but triggers no actions and no notifications."""
    body = {"name": name, "for_s": 0.0 if lift else seconds(duration)}
    made = ApiClient.find(cluster).call("POST", "/v1/alerts/silences", body)
    text = f"{name} is not silenced any more" if lift else f"{name} is silent until {local_time(made['until_s'])}"
    as_result(made, text, json)


@nodes.command("list")
def list_nodes(cluster: ClusterName = None, json: Json = False) -> None:
    """List the nodes, including those that are kept out of use."""
    found = ApiClient.find(cluster).status().nodes
    as_list(found, ("NODE", "TYPE", "ZONE", "MARKET", "STATE", "QUARANTINED", "REASON"), _node_row, json)


@nodes.command()
def quarantine(node: NodeId, reason: Reason = "", cluster: ClusterName = None, json: Json = False) -> None:
    """Drain a node, and keep its machine out of use until you run `nodes release`.

    NODE may also name one of your own machines in cluster.yaml. No new node is then started on that machine.
    """
    _order("quarantine_node", node, reason, cluster, json)


@nodes.command()
def release(node: NodeId, reason: Reason = "", cluster: ClusterName = None, json: Json = False) -> None:
    """Lift the quarantine of a node, which may run on one of your own machines.

    The node is still terminated, because Ray does not take a drained node back. If the node runs on a machine of
    your own, that machine can then be used for a new node.
    """
    _order("release_node", node, reason, cluster, json)


@nodes.command()
def replace(node: NodeId, reason: Reason = "", cluster: ClusterName = None, json: Json = False) -> None:
    """Drain a node and end it. The work of the node moves to other nodes. If these have no capacity, it moves to a new
    node.
    """
    _order("replace_node", node, reason, cluster, json)


def _order(kind: str, node: str, reason: str, cluster: str | None, json: bool) -> None:
    body = {"id": f"cli-{secrets.token_hex(8)}", "kind": kind, "subject": node, "reason": reason}
    made = ApiClient.find(cluster).call("POST", "/v1/orders", body)
    if json:
        as_json(made)
    elif made["outcome"]:
        print(f"{node}: {made['outcome']}")
    else:
        print(f"{kind} {node} is ordered; `raytide nodes list` shows the node")


def _alert_row(alert: dict[str, Any]) -> tuple[object, ...]:
    state = alert["state"] + (" (silenced)" if alert["silenced"] else "")
    since, labels, action = local_time(alert["since_s"]), _labels(alert["labels"]), alert["action"]
    done = "-" if action is None else f"{action['do']}: {action['state']}"
    return (state, alert["severity"], alert["name"], labels, since, done, alert["summary"])


def _action_row(each: dict[str, Any]) -> tuple[object, ...]:
    fields = ("alert", "kind", "object", "state", "outcome")
    return (local_time(each["at_s"]), *(each[field] for field in fields))


def _probe_row(each: dict[str, Any]) -> tuple[object, ...]:
    answered, right = (_YES[each.get(field)] for field in ("success", "right"))
    seconds = each.get("seconds")
    return (each["endpoint"], each["probe"], answered, right, "-" if seconds is None else f"{seconds:.2f}")


def _transition_row(each: dict[str, Any]) -> tuple[object, ...]:
    return (local_time(each["at_s"]), each["state"], each["name"], _labels(each["labels"]), each["summary"])


def _node_row(node: Node) -> tuple[object, ...]:
    return (node.id, node.type, node.zone, node.market, node.state, node.quarantined or "-", node.reason)


def _labels(labels: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in labels.items())
