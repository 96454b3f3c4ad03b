"""The API calls of alert actions. They use the operator's token, so each call is authenticated and in the audit log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raytide.control.client.api_client import ApiClient
from raytide.core.errors import ConflictError
from raytide.core.specs.rollout import RolloutState
from raytide.dashboards.alerts.records import ActionRecord, ActionState

_ROLLBACK = "rollback to revision"


class OperatorClient:
    """API calls for alert actions. Each call may be repeated. A repetition has no further effect, except that of
    `note_action`, which writes another entry.
    """

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    def order(self, key: str, kind: str, subject: str, plan: Mapping[str, Any]) -> str:
        """Gives the controller an order. The controller carries it out at its next tick."""
        body = {"id": key, "kind": kind, "subject": subject, "reason": plan["why"]}
        if kind == "restart_replica":
            if not plan["endpoint"]:
                raise ConflictError("the alert does not say of which endpoint the replica is.")
            body |= {"subject": plan["endpoint"], "replica": subject}
        found = self._api.call("POST", "/v1/orders", body)
        return str(found["outcome"] or f"ordered as {found['id']}")

    def rollback_target(self, endpoint: str) -> dict[str, Any]:
        """Returns the plan of a rollback. If a rollout runs, the plan is to end it. Otherwise the plan is to return to
        the revision that served before the current one.

        Raises ConflictError if no rollout runs and no revision served before. Also raises ConflictError if the endpoint
        does not serve its newest revision, or has been rolled back already.
        """
        rollouts = self._api.call("GET", f"/v1/endpoints/{endpoint}/rollouts")
        live = [each["rollout"] for each in rollouts if RolloutState(each["rollout"]["state"]).is_live]
        if live:
            return {"rollout": live[0]["number"]}
        newest = self._api.call("GET", f"/v1/endpoints/{endpoint}/revisions")[0]
        now = self._api.call("GET", f"/v1/endpoints/{endpoint}")
        if newest["number"] != now["revision"] or newest["why"].startswith(_ROLLBACK):
            raise ConflictError(f"{endpoint} was rolled back already.", hint="Nothing was changed.")
        if not now["previous"]:
            raise ConflictError(f"{endpoint} has no earlier revision.", hint="Nothing was changed.")
        return {"revision": now["previous"], "from": now["revision"]}

    def roll_back(self, endpoint: str, plan: Mapping[str, Any]) -> str:
        """Ends the rollout that the plan names, or returns to the revision that the plan names, unless that was done
        already.
        """
        if number := plan.get("rollout"):
            rollouts = self._api.call("GET", f"/v1/endpoints/{endpoint}/rollouts")
            mine = [each["rollout"] for each in rollouts if each["rollout"]["number"] == number]
            if any(RolloutState(each["state"]).is_live for each in mine):
                self._api.call("POST", f"/v1/endpoints/{endpoint}/rollout/stop", None, {"why": plan["why"]})
            return f"rollout {number} is stopped"
        revisions = self._api.call("GET", f"/v1/endpoints/{endpoint}/revisions")
        if revisions[0]["number"] == plan["from"]:
            self._api.call("POST", f"/v1/endpoints/{endpoint}/rollback", None, {"revision": plan["revision"]})
        elif not str(revisions[0].get("why", "")).startswith(f"{_ROLLBACK} {plan['revision']}"):
            return f"{endpoint} has a newer revision already; it stays"
        return f"{endpoint} went back to revision {plan['revision']}"

    def pause_budget(self, team: str) -> str:
        """Sets the team's monthly budget to zero. It stays zero until `raytide budget reset`."""
        self._api.call("PATCH", f"/v1/teams/{team}", {"budget": {"soft_usd": 0.0, "hard_usd": 0.0}})
        return f"the budget of {team} is 0: nothing of it starts until `raytide budget reset {team}`"

    def note_action(self, record: ActionRecord, state: ActionState, outcome: str) -> None:
        """Writes the end of an action into the audit log."""
        body = {"alert": record.alert, "kind": record.kind, "object": record.object, "key": record.key}
        self._api.call("POST", "/v1/alerts/actions", {**body, "state": state, "outcome": outcome[:1000]})
