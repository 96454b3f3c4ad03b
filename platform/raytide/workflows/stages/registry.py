"""The stages `register` and `serve`. They send requests to the API and have no jobs. A repeated request changes
nothing, with one exception: a failed endpoint is deployed once more.
"""

from __future__ import annotations

from raytide.control.client import ApiClient
from raytide.control.views import EndpointStatus
from raytide.core.errors import ConfigError, NotFoundError
from raytide.core.objects.endpoint import EndpointState, ServeSpec
from raytide.core.specs.model_version import SCHEME, ModelReference, PromotionRule
from raytide.registry.rollout.promotion import decide_promotion
from raytide.sdk.registry.models import ModelRegistry
from raytide.workflows.stages.base import StageReport, StageTask
from raytide.workflows.stages.configs import RegisterSpec

_REFUSED = "refused: "
_SET_BY_THE_API = {"model", "version", "team", "labels"}


def register(client: ApiClient, task: StageTask) -> str:
    """Registers a model version and returns its id, such as `chat:3`. Registering the same model and metrics again
    returns the same version.
    """
    spec = RegisterSpec.parse(task.spec, where=task.name)
    version = ModelRegistry(client).register(
        spec.name, spec.model, job=spec.job, metrics=spec.metrics, note=spec.note, team=task.team or ""
    )
    return version.id


def registered(handle: str) -> StageReport:
    return StageReport("done", outputs={"reference": f"{SCHEME}{handle}", "version": handle.rpartition(":")[2]})


def serve(client: ApiClient, task: StageTask) -> str:
    """Deploys the spec to the endpoint and returns the endpoint's name. An endpoint that already has this spec is
    deployed again only if it has failed.

    The stage's rule compares the new version with the served version. If the rule does not hold, nothing is changed,
    and the result is a text with the reason.
    """
    spec = ServeSpec.parse({**task.spec, **({"team": task.team} if task.team else {})}, where=task.name)
    try:
        now: EndpointStatus | None = client.endpoint(spec.name)
    except NotFoundError:
        now = None
    if now is not None and now.endpoint.state not in (EndpointState.DELETED, EndpointState.DELETING):
        if _is_served(spec, now):
            if now.endpoint.is_given_up:
                client.serve(spec)  # without the rule, which would compare the version with itself
            return spec.name
    else:
        now = None
    if task.options.rule and (why := _broken_rule(client, task, spec, now)):
        return f"{_REFUSED}{why}"
    client.serve(spec)
    return spec.name


def served(client: ApiClient, task: StageTask, handle: str) -> StageReport:
    """Returns the state of a serve stage. The stage is done once a replica with the stage's spec answers.

    It is also done if no replica is needed: the endpoint is scaled to zero, or a hosted API answers the endpoint's
    requests.
    """
    if handle.startswith(_REFUSED):
        return StageReport("refused", handle.removeprefix(_REFUSED))
    status = client.endpoint(handle)
    if status.endpoint.is_given_up:
        return StageReport("failed", f"endpoint {handle} failed: {status.endpoint.reason}")
    if status.endpoint.state in (EndpointState.DELETING, EndpointState.DELETED):
        return StageReport("failed", f"endpoint {handle} was deleted")
    answers = (status.ready_replicas > 0 and _is_new(client, status)) or status.endpoint.spec.backend is not None
    scaled_to_zero = status.endpoint.state is EndpointState.RUNNING and status.endpoint.target_replicas == 0
    if not answers and not scaled_to_zero:
        return StageReport("running", status.waiting.reason if status.waiting else "")
    return StageReport("done", outputs={"name": handle, "url": status.base_url})


def _is_served(spec: ServeSpec, now: EndpointStatus) -> bool:
    """Returns whether the endpoint already has this spec, so that serving it again would only add a revision."""
    there = now.endpoint.spec
    location = spec.model.removeprefix(SCHEME)
    if location not in (there.model, there.version):
        return False
    return spec.model_dump(exclude=_SET_BY_THE_API) == there.model_dump(exclude=_SET_BY_THE_API)


def _is_new(client: ApiClient, status: EndpointStatus) -> bool:
    """Returns whether a replica of the present revision answers; until one does, replicas of the previous revision
    answer.
    """
    revisions = client.revisions(status.endpoint.name)
    if len(revisions) < 2:
        return True
    now, before = revisions[0], revisions[1]
    is_anew = status.endpoint.created_at_s >= now.at_s  # the same spec again, after Serve had given it up
    if now.spec is None or before.spec is None or (now.spec.served == before.spec.served and not is_anew):
        return True  # the replicas stay
    return any(start.is_ready and start.ordered_at_s >= now.at_s for start in status.startups)


def _broken_rule(client: ApiClient, task: StageTask, spec: ServeSpec, now: EndpointStatus | None) -> str:
    """Returns why the new version may not replace the served one; empty if it may."""
    if not spec.model.startswith(SCHEME):
        raise ConfigError(
            f"{task.name}: its rule compares the metrics of registered versions, and {spec.model} is a directory.",
            hint="Serve `${STAGE.reference}` of a register stage, or use `when`.",
        )
    metrics = client.model_version(ModelReference.parse(spec.model)).spec.metrics
    champion = now.endpoint.spec.version if now is not None else ""
    before = client.model_version(ModelReference.parse(champion)).spec.metrics if champion else None
    rule = PromotionRule(metrics=task.options.rule, online="ignored")
    decision = decide_promotion(rule, before, metrics)
    shown = f" in place of {champion}" if champion else ""
    return "" if decision.promotes else f"{spec.model} is not served{shown}: {'; '.join(decision.reasons)}"
