"""Waits for an endpoint outlive an API that restarts, and a refused swap is then still taken back."""

from __future__ import annotations

from typing import cast

import pytest

from raytide.control.client import ApiClient
from raytide.control.views import EndpointStatus
from raytide.core.errors import ClusterError, ConflictError
from raytide.core.objects.endpoint import Endpoint, EndpointState, ServeSpec
from raytide.core.objects.endpoint_load import ReplicaLive
from raytide.core.specs.live_changes import WeightsChange
from raytide.sdk.jobs import job_run
from raytide.sdk.serving import endpoint as module
from raytide.sdk.serving.endpoint import EndpointHandle

AWAY = ClusterError("the API does not answer.")


class Api:
    """Each look finds the next of these replicas, or no API."""

    def __init__(self, *found: tuple[ReplicaLive, ...] | Exception) -> None:
        self.found, self.asked = list(found), list[str]()

    def status(self, live: tuple[ReplicaLive, ...]) -> EndpointStatus:
        spec = ServeSpec(name="chat", model="m", weights=self.asked[-1] if self.asked else "")
        shown = Endpoint(spec, "ann", EndpointState.RUNNING, created_at_s=0.0, target_replicas=2)
        return EndpointStatus(shown, "http://x/chat/v1", len(live), 0.0, 0, live=live)

    def endpoint(self, name: str) -> EndpointStatus:
        found = self.found.pop(0)
        if isinstance(found, Exception):
            raise found
        return self.status(found)

    def change_weights(self, name: str, change: WeightsChange) -> EndpointStatus:
        self.asked.append(change.location)
        return self.status(())


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.0)
    monkeypatch.setattr(job_run, "_POLL_S", 0.0)


def handle(api: Api) -> EndpointHandle:
    return EndpointHandle(cast("ApiClient", api), api.status(()))


def test_a_wait_outlives_an_api_that_restarts() -> None:
    assert handle(Api((), AWAY, AWAY, (ReplicaLive("r1"),))).wait().status.ready_replicas == 1


def test_a_swap_that_is_refused_after_a_restart_is_taken_back() -> None:
    done = ReplicaLive("r1", weights="/new", asked="/new")
    refused = ReplicaLive("r2", asked="/new", error="no room")
    api = Api((), AWAY, AWAY, (done, refused))
    with pytest.raises(ConflictError, match="no room"):
        handle(api).swap_weights("/new")
    assert api.asked == ["/new", ""]
