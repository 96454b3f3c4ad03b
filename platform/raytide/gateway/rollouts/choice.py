"""Chooses the revision that answers a request. Decides whether the champion may answer after the challenger has
failed.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from raytide.actors.serving.openai_api.admission import CALLER
from raytide.actors.serving.openai_api.errors import to_api_error
from raytide.core.errors import EngineDeadError, OverloadedError, WaitTimeoutError
from raytide.gateway.tenancy.tenancy import GatewayCaller
from raytide.registry.rollout.routes import RolloutRoute

_ADMISSION = frozenset({401, 403, 429})
"""The statuses of requests that are not allowed to their caller, whichever revision answers."""
_TIMED_OUT = "timeout"
_UNIT = "raytide.unit"
"""The key of the ASGI scope with the random id of a request that names no user."""


def is_for_challenger(rollout: RolloutRoute, scope: Any, session: str) -> bool:
    """Returns whether the challenger answers this request. `session` is the user or session that the request names, or
    "" if the request names none.

    If the rollout splits traffic by API key, the call also stores the request's traffic group in the caller object.
    """
    unit = unit_of(scope, session, by_key=rollout.by_key)
    caller = scope.get(CALLER)
    if rollout.by_key and isinstance(caller, GatewayCaller):
        caller.group = rollout.split.group_of(unit)
    return rollout.split.revision_of(unit) == rollout.split.challenger


def unit_of(scope: Any, session: str, *, by_key: bool) -> str:
    """Returns the unit by which the traffic split assigns this request to a revision. A unit always gets the same
    revision.

    The unit is the first of these that applies:
    - the user or session that the request names, within the caller's account
    - with `by_key`, the caller's account
    - a random id for this request alone, which `scope` keeps
    """
    caller = scope.get(CALLER)
    key = caller.key if isinstance(caller, GatewayCaller) else None
    account = "" if key is None else key.account
    if session:
        return f"{account}/{session}"
    return account if by_key and account else str(scope.setdefault(_UNIT, uuid4().hex))


def is_overload(error: Exception) -> bool:
    return isinstance(error, OverloadedError) or isinstance(error.__cause__, OverloadedError)


def is_for_fallback(error: Exception) -> bool:
    """Returns whether the fallback API may answer a request that failed with this error. The result is True if every
    replica was full, dead or gone.
    """
    causes = (error, error.__cause__)
    return is_overload(error) or any(isinstance(each, EngineDeadError | WaitTimeoutError) for each in causes)


def champion_may_answer(error: Exception) -> bool:
    """Returns whether the champion may answer a request after the challenger failed. The challenger had not sent any
    part of a response yet.

    The champion may not answer if the caller lacks permission or exceeds a limit, or if the request's time is over.
    It may answer if the challenger refused the content, because the challenger may be wrong.
    """
    if is_overload(error) or isinstance(error.__cause__, WaitTimeoutError):
        return True
    found = to_api_error(error)
    return found.status not in _ADMISSION and found.body.error.code != _TIMED_OUT
