"""The token of Alertmanager opens its webhook and nothing else."""

import pytest

from raytide.control.api.auth import ALERTS_ROUTE, Caller, _callers
from raytide.core.errors import DeniedError

TOKENS = {"a": {"role": "alertmanager"}, "g": {"role": "gateway"}, "o": {"user": "admin", "team": "*"}}


def test_alertmanager_opens_its_webhook_alone() -> None:
    caller = _callers(TOKENS)["a"]
    caller.require_route(ALERTS_ROUTE)
    caller.require_person().require_all()
    for path in ("/v1/jobs", "/v1/alerts", "/v1/gateway/endpoints", "/v1/alerts/webhook/x"):
        with pytest.raises(DeniedError):
            caller.require_route(path)


def test_others_open_what_they_did() -> None:
    callers = _callers(TOKENS)
    callers["o"].require_route("/v1/jobs")
    callers["o"].require_route(ALERTS_ROUTE)
    callers["g"].require_route("/v1/gateway/endpoints")
    with pytest.raises(DeniedError):
        callers["g"].require_route(ALERTS_ROUTE)
    assert callers["o"] == Caller("admin", "*")
