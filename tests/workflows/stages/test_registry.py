"""Serving by a flow: once for equal specs, and never a version that its rule does not allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.workflows.fake_api import FakeApi
from tests.workflows.stages.test_runner import task_of

from raytide.control.views import EndpointStatus
from raytide.core.errors import ConfigError, NotFoundError
from raytide.core.objects.endpoint import UPDATE_FAILED, Endpoint, EndpointRevision, EndpointState, ServeSpec
from raytide.core.objects.endpoint_load import ReplicaStartup
from raytide.core.specs.model_version import ModelReference, ModelVersion, ModelVersionSpec
from raytide.workflows.stages import registry
from raytide.workflows.stages.base import StageReport, StageTask


class Serving(FakeApi):
    """Knows versions of a model by their losses, and one endpoint."""

    def __init__(self, *losses: float) -> None:
        super().__init__()
        self.losses = losses
        self.status: EndpointStatus | None = None
        self.requests: list[ServeSpec] = []
        self.history: list[EndpointRevision] = []

    def model_version(self, reference: ModelReference) -> ModelVersion:
        assert reference.version is not None
        metrics = {"loss": self.losses[reference.version - 1]}
        spec = ModelVersionSpec(name=reference.name, location="/m", sha256="0" * 64, metrics=metrics)
        return ModelVersion(spec, reference.version, "ada", 0.0)

    def endpoint(self, name: str) -> EndpointStatus:
        if self.status is None:
            raise NotFoundError(f"endpoint {name} does not exist.")
        return self.status

    def revisions(self, name: str) -> list[EndpointRevision]:
        return self.history

    def serve(self, spec: ServeSpec) -> EndpointStatus:
        """Stores the spec as the API does: with the location and the version in place of the reference."""
        self.requests.append(spec)
        version = spec.model.removeprefix("registry:")
        stored = spec.model_copy(update={"model": f"/models/{version}", "version": version})
        self.history.insert(0, EndpointRevision(spec.name, len(self.history) + 1, "default", "ada", 10.0, "", stored))
        endpoint = Endpoint(stored, "ada", EndpointState.DEPLOYING, 0.0, 1)
        self.status = EndpointStatus(endpoint, "http://x/chat/v1", 0, 0.0, 0)
        return self.status


def task(version: int, rule: dict[str, Any] | None = None, **fields: Any) -> StageTask:
    spec = {"name": "chat", "model": f"registry:chat:{version}", **fields}
    return task_of("serve", spec, rule=rule or {})


def test_the_same_spec_is_served_once_and_another_one_again() -> None:
    api = Serving(3.0, 2.0)
    for _ in range(2):
        assert registry.serve(api, task(1)) == "chat"
    assert len(api.requests) == 1
    registry.serve(api, task(1, resources={"CPU": 2}))
    registry.serve(api, task(2, resources={"CPU": 2}))
    assert len(api.requests) == 3


LOWER = {"loss": {"better": "lower", "gain": 0.0}}


def in_state(status: EndpointStatus | None, state: EndpointState, reason: str = "") -> EndpointStatus:
    assert status is not None
    return replace(status, endpoint=replace(status.endpoint, state=state, reason=reason))


def test_an_endpoint_that_failed_is_deployed_again_by_the_next_attempt_whatever_the_rule() -> None:
    api, better = Serving(2.0), {"loss": {"better": "lower", "gain": 0.5}}
    registry.serve(api, task(1, better))
    api.status = in_state(api.status, EndpointState.FAILED, "no such file")
    handle = registry.serve(api, task(1, better))
    assert len(api.requests) == 2
    assert registry.served(api, task(1, better), handle) == StageReport("running")


def test_a_worse_version_is_refused_and_the_old_one_stays() -> None:
    api = Serving(2.0, 3.0, 1.0)
    registry.serve(api, task(1, LOWER))
    refused = registry.served(api, task(2, LOWER), registry.serve(api, task(2, LOWER)))
    assert refused.status == "refused"
    assert refused.reason.startswith("registry:chat:2 is not served in place of chat:1: loss: -1 over")
    assert api.status is not None
    assert api.status.endpoint.spec.version == "chat:1"
    registry.serve(api, task(3, LOWER))
    assert api.status.endpoint.spec.version == "chat:3"


def test_a_limit_counts_for_the_first_version_too() -> None:
    api = Serving(2.0)
    handle = registry.serve(api, task(1, {"loss": {"better": "lower", "limit": 1.5}}))
    assert registry.served(api, task(1), handle).status == "refused"
    assert api.requests == []


def test_a_rule_needs_a_registered_version() -> None:
    with pytest.raises(
        ConfigError, match="its rule compares the metrics of registered versions, and /m is a directory"
    ):
        registry.serve(Serving(), task(1, LOWER, model="/m"))


def test_a_stage_is_done_once_a_replica_answers_and_failed_with_the_endpoint() -> None:
    api = Serving(2.0)
    handle = registry.serve(api, task(1))
    assert registry.served(api, task(1), handle) == StageReport("running")
    assert api.status is not None
    api.status = replace(api.status, ready_replicas=1)
    outputs = {"name": "chat", "url": "http://x/chat/v1"}
    assert registry.served(api, task(1), handle) == StageReport("done", outputs=outputs)
    broken = replace(api.status.endpoint, state=EndpointState.FAILED, reason="no such file")
    api.status = replace(api.status, endpoint=broken)
    assert registry.served(api, task(1), handle).reason == "endpoint chat failed: no such file"


def test_a_stage_whose_update_serve_gave_up_has_failed_although_earlier_replicas_answer() -> None:
    api = Serving(2.0, 1.0)
    registry.serve(api, task(1))
    handle = registry.serve(api, task(2))
    why = f"{UPDATE_FAILED}no such file"
    api.status = replace(in_state(api.status, EndpointState.RUNNING, why), ready_replicas=1)
    assert registry.served(api, task(2), handle) == StageReport("failed", f"endpoint chat failed: {why}")
    registry.serve(api, task(2))
    assert len(api.requests) == 3, "the next attempt deploys it again"


@pytest.mark.parametrize("state", [EndpointState.DELETING, EndpointState.DELETED])
def test_a_stage_whose_endpoint_was_deleted_has_failed(state: EndpointState) -> None:
    api = Serving(2.0)
    handle = registry.serve(api, task(1))
    api.status = in_state(api.status, state)
    assert registry.served(api, task(1), handle) == StageReport("failed", "endpoint chat was deleted")


def test_a_new_version_is_served_once_one_of_its_own_replicas_answers() -> None:
    api = Serving(2.0, 1.0)
    registry.serve(api, task(1))
    handle = registry.serve(api, task(2))
    assert api.status is not None
    old = ReplicaStartup("old", ordered_at_s=5.0, phases=(), is_ready=True)
    api.status = replace(api.status, ready_replicas=1, startups=(old,))
    assert registry.served(api, task(2), handle).status == "running", "the replica of the version before"
    new = replace(old, id="new", ordered_at_s=11.0, is_ready=False)
    api.status = replace(api.status, startups=(old, new))
    assert registry.served(api, task(2), handle).status == "running"
    api.status = replace(api.status, startups=(old, replace(new, is_ready=True)))
    assert registry.served(api, task(2), handle).status == "done"


def test_a_change_that_keeps_the_replicas_is_served_at_once() -> None:
    api = Serving(2.0)
    registry.serve(api, task(1))
    handle = registry.serve(api, task(1, max_ongoing=7))
    assert api.status is not None
    api.status = replace(api.status, ready_replicas=1)
    assert registry.served(api, task(1), handle).status == "done"


def test_a_registered_version_is_known_by_its_reference() -> None:
    assert registry.registered("chat:3").outputs == {"reference": "registry:chat:3", "version": "3"}
