"""The API's operations on endpoints, without HTTP."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from raytide.actors.serving.engines import choose_engine
from raytide.autoscaler.endpoints.load_target import cold_start_s
from raytide.control.api.auth import Caller
from raytide.control.api.services.input_check import Inputs
from raytide.control.api.services.limits import LimitsService
from raytide.control.api.services.logs import endpoint_log
from raytide.control.api.services.logs.endpoint_log import LogFiles
from raytide.control.api.services.registry import ModelService
from raytide.control.api.services.submission_rate import SubmissionRate
from raytide.control.views import EndpointLogPart, EndpointStatus, Live, RevisionOutcome, RolloutStatus
from raytide.core.clock import Clock
from raytide.core.errors import ConfigError, ConflictError, DeniedError
from raytide.core.money import to_us
from raytide.core.objects.cluster_config import ClusterConfig
from raytide.core.objects.endpoint import Endpoint, EndpointRevision, EndpointState, ServeSpec
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.hardware.resources import resolve_accelerator
from raytide.core.objects.hardware.transfer import DataInput
from raytide.core.specs.live_changes import AdapterChange, SignalReport, WeightsChange
from raytide.core.specs.rollout import (
    REVISION_SEPARATOR,
    CountedRevision,
    Feedback,
    RevisionFeedback,
    Rollout,
    RolloutReport,
    Serving,
    endpoint_of,
)
from raytide.core.state import Store
from raytide.core.state.queries.jobs import no_endpoint
from raytide.ledger.report import accrued, costs
from raytide.registry.rollout.lifecycle import intervals
from raytide.registry.rollout.spec import NewRollout
from raytide.scheduling.diagnosis import check_possible
from raytide.sizing.serving import check_memory


class EndpointService:
    """Creates, shows and deletes endpoints."""

    def __init__(
        self,
        store: Store,
        config: ClusterConfig,
        clock: Clock,
        live: Callable[[], Live],
        inputs: Inputs,
        accounts: LimitsService,
        models: ModelService,
        serve_url: str,
        rate: SubmissionRate,
        files: LogFiles,
    ) -> None:
        self._store, self._config, self._clock, self._live, self._files = store, config, clock, live, files
        self._inputs, self._accounts, self._serve_url = inputs, accounts, serve_url
        self._models, self._rate = models, rate
        self._changing = threading.Lock()

    def serve(self, body: Mapping[str, object], caller: Caller, why: str = "", *, seen: int = 0) -> EndpointStatus:
        """Creates an endpoint, or gives it a new spec. Raises ConflictError if `seen`, the revision that the spec was
        derived from, does not serve the endpoint any more."""
        spec = self._checked(ServeSpec.parse({"team": caller.home, **body}, where="serve"), caller)
        self._store.save_endpoint(spec, caller.user, self._clock.now_s(), why, seen)
        return self.get(spec.name, caller)

    def start_rollout(self, body: Mapping[str, object], caller: Caller) -> RolloutStatus:
        """Starts a rollout and returns its status. A new revision, the challenger, runs beside the current one, the
        champion.
        """
        asked = NewRollout.parse(body, where="rollout")
        spec = self._checked(asked.serve_spec(caller.home), caller)
        plan = asked.rollout.model_dump(mode="json")
        now_s = self._clock.now_s()
        return self._status(self._store.rollouts.start(spec, asked.rollout.kind, plan, caller.user, now_s, asked.why))

    def end_rollout(self, name: str, end: Literal["stop", "promote"], why: str, caller: Caller) -> RolloutStatus:
        """Requests the end of the live rollout: "stop" returns to the champion, "promote" keeps the challenger."""
        caller.require_team(self._store.endpoint(name).spec.team)
        self._rate.take_change(caller.home)
        return self._status(self._store.rollouts.ask(name, end, caller.user, why))

    def rollouts(self, name: str, caller: Caller, limit: int) -> list[RolloutStatus]:
        """Returns the rollouts of an endpoint, newest first."""
        caller.require_team(team := self._store.endpoint(name).spec.team)
        return [self._status(rollout) for rollout in self._store.rollouts.page(name, team=team, limit=limit)]

    def count_rollouts(self, body: Mapping[str, object]) -> None:
        """Stores the request counts that a gateway reports for rollouts."""
        self._store.rollouts.report(RolloutReport.parse(body, where="rollouts"))

    def save_feedback(self, body: Mapping[str, object]) -> int:
        """Stores a user's feedback on a response, as a gateway forwards it. Returns the number of the revision that
        gave the response.
        """
        return self._store.feedback.save(Feedback.parse(body, where="feedback"), self._clock.now_s())

    def feedback(self, name: str, caller: Caller) -> tuple[RevisionFeedback, ...]:
        """Returns the number of thumbs up and down for each revision of an endpoint, newest revision first."""
        caller.require_team(self._store.endpoint(name).spec.team)
        return self._store.feedback.sums(name)

    def _checked(self, spec: ServeSpec, caller: Caller) -> ServeSpec:
        """Returns the spec with its references to registered models and accelerators resolved. Raises an error for a
        spec that cannot run."""
        if REVISION_SEPARATOR in spec.name:
            raise ConfigError(f"serve: name: {spec.name} has a {REVISION_SEPARATOR}.", hint="Choose another name.")
        caller.require_team(spec.team)
        spec = self._models.resolved(spec, caller)
        self._accounts.check_team(spec.team)
        self._config.settings.check_packages(spec.pip, spec.team, f"endpoint {spec.name}")
        self._check_options(spec)
        if spec.priority is not None:
            self._accounts.check_priority(spec.priority)
        labels = resolve_accelerator(spec.labels, self._config.node_types)
        spec = spec.model_copy(update={"labels": labels})
        choose_engine(spec)
        self._inputs.check_private(spec.model_dump(), spec.name, is_checked_later=False)
        shape = Shape(members=max(1, spec.replicas.min) * spec.members, resources=spec.resources, labels=spec.labels)
        check_possible(GangSpec(shapes=(shape,)), self._config.node_types, subject=f"endpoint {spec.name}")
        self._check_hosted(spec)
        if spec.backend is None:
            self._inputs.check_model(spec.model, caller, spec.adapters.values())
            if spec.engine.get("kind") != "fake" and (size := self._inputs.weight_bytes(spec.model, caller)):
                spec = check_memory(spec, size, self._config.node_types)
                if not spec.inputs and self._config.settings.transfer is not None:
                    spec = spec.model_copy(update={"inputs": (DataInput(url=spec.model, gb=size / 1e9),)})
        if spec.weights:
            self._inputs.check_weights(spec.model, spec.weights, caller)
        self._rate.take_change(spec.team, len(spec.model_dump_json()))
        return spec

    def all(self, caller: Caller) -> list[EndpointStatus]:
        """Returns the status of all endpoints that the caller may see, including deleted ones. Revisions that a rollout
        tests, or that still finish requests, are listed separately.
        """
        booked = self._store.books.booked("endpoint", team=caller.only_team)
        pending = accrued(self._store.books.intervals(), to_us(self._clock.now_s()))
        spent = costs(booked, (entry for entry in pending if caller.sees(entry.team)), "endpoint")
        serving = self._store.rollouts.all_serving()
        found = {each.name: each for each in self._store.endpoints(ended=True) if caller.sees(each.spec.team)}
        live = self._live()
        shown: dict[str, Serving] = {}
        for name, endpoint in found.items():
            now = serving.get(endpoint_of(name)) or Serving(name, name, 0)
            if now.application == name:
                shown[name] = now
            elif endpoint.state is not EndpointState.DELETED and name != now.name:
                shown[name] = Serving(name, name, 0)
        ended: Counter[str] = Counter()  # the costs of revisions that have ended, by the application that serves now
        for name in spent.keys() - shown.keys():
            of = endpoint_of(name)
            ended[serving[of].application if of in serving else of] += spent[name]
        return [self._endpoint(found[name], now, spent.get(name, 0) + ended[name], live) for name, now in shown.items()]

    def _endpoint(self, endpoint: Endpoint, now: Serving, cost_micro_usd: int, live: Live) -> EndpointStatus:
        load = live.loads.get(endpoint.name)
        return EndpointStatus(
            endpoint=replace(endpoint, spec=endpoint.spec.model_copy(update={"name": now.name})),
            base_url=f"{self._serve_url}/{now.name}/v1",
            ready_replicas=load.ready if load else 0,
            ongoing=load.ongoing if load else 0.0,
            cost_micro_usd=cost_micro_usd,
            waiting=live.waiting.get(endpoint.name),
            cold_start_s=cold_start_s(endpoint.spec.replicas, load),
            cold_start_is_learned=bool(load and load.traffic and load.traffic.cold_start_s is not None),
            paces=load.traffic.paces if load and load.traffic else {},
            startups=load.startups if load else (),
            live=load.live if load else (),
            revision=now.revision,
            previous=now.previous,
        )

    def _status(self, rollout: Rollout) -> RolloutStatus:
        """Returns the status of a rollout with the counts of both revisions; for an ended rollout, the counts at its
        end.
        """
        versions = {
            each.number: each.spec.version
            for each in self._store.revisions.page(rollout.name, team=rollout.team)
            if each.spec is not None
        }
        counted = self._store.rollouts.counts([rollout.number])[rollout.number]
        sides = {"champion": rollout.champion, "challenger": rollout.challenger}
        outcomes = {}
        for side, revision in sides.items():
            counts = counted.get(revision) or CountedRevision(rollout=rollout.number, revision=revision)
            if rollout.ended_at_s is not None:
                kept = rollout.progress.get("seen", {}).get(side, {})
                counts = CountedRevision(rollout=rollout.number, revision=revision, **kept)
            shares = intervals(counts, rollout.progress.get("metrics", {}).get(side, {}))
            outcomes[side] = RevisionOutcome(revision, versions.get(revision, ""), counts, shares)
        return RolloutStatus(rollout, **outcomes)

    def get(self, name: str, caller: Caller) -> EndpointStatus:
        """Returns the status of an endpoint, or of a revision that `all` lists separately. Raises NotFoundError if
        there is none."""
        caller.require_team(self._store.endpoint(name).spec.team)
        found = next((status for status in self.all(caller) if status.endpoint.name == name), None)
        if found is None:  # a revision that is deleted, or that now serves the endpoint
            raise no_endpoint(name)
        return found

    def revisions(self, name: str, caller: Caller) -> tuple[EndpointRevision, ...]:
        """Returns the revisions of an endpoint, newest first."""
        caller.require_team(team := self._store.endpoint(name).spec.team)
        return self._store.revisions.page(name, team=team)

    def roll_back(self, name: str, number: int, caller: Caller) -> EndpointStatus:
        """Gives the endpoint the spec of an earlier revision."""
        caller.require_team(team := self._store.endpoint(name).spec.team)
        revision = self._store.revisions.find(name, team=team, number=number)
        if revision.spec is None:
            raise ConflictError(
                f"revision {revision.number} of {name} cannot be read: {revision.unreadable}.",
                hint="Choose another revision.",
            )
        return self.serve(revision.spec.model_dump(mode="json"), caller, f"rollback to revision {revision.number}")

    def logs(self, name: str, after: str, tail: int | None, caller: Caller) -> EndpointLogPart:
        """Returns a part of the output of the endpoint's replicas, including those that ended most recently."""
        caller.require_team(self._store.endpoint(name).spec.team)
        loads = [load for each, load in self._live().loads.items() if endpoint_of(each) == name]
        running = [start.id for load in loads for start in load.startups]
        logs = [log for load in loads for log in load.logs]
        gone = endpoint_log.gone_nodes(self._store.nodes(ray_node_ids={log.node for log in logs if log.node}))
        return endpoint_log.part(self._files, logs, after, tail, running, gone)

    def report(self, name: str, body: Mapping[str, object], caller: Caller) -> None:
        """Stores values that users report for the signals on which the endpoint scales. A value is used for five
        minutes.
        """
        caller.require_team((endpoint := self._store.endpoint(name)).spec.team)
        report = SignalReport.parse({"values": body}, where="signals")
        report.check(endpoint.spec)
        self._store.signals.save(name, report.values, self._clock.now_s())

    def change_weights(self, name: str, body: Mapping[str, object], caller: Caller) -> EndpointStatus:
        """Changes the weights that the endpoint serves. Its replicas swap the weights in place, without a restart."""
        change = WeightsChange.parse(body, where="weights")
        with self._changing:
            now = self.get(name, caller)
            fields = {**now.endpoint.spec.model_dump(mode="json"), "weights": change.location}
            return self.serve(fields, caller, f"weights {change.location or 'of the model'}", seen=now.revision)

    def _check_options(self, spec: ServeSpec) -> None:
        """Refuses options of vLLM that may run a team's code, if `run_as` names a user for this code."""
        from raytide.actors.engine.backends.vllm.config import code_options

        names = ", ".join(code_options(spec.engine))[:200]
        code = f"the code that vLLM's {names} may name" if names else None
        self._config.settings.check_code(code, spec.team, f"endpoint {spec.name}", "Leave it out of engine.vllm.")

    def _check_hosted(self, spec: ServeSpec) -> None:
        """Refuses hosted APIs that the operator has not allowed: gateways would send their keys there."""
        allowed = {api.base_url for api in self._config.settings.gateway.hosted}
        for hosted in (spec.backend, spec.fallback):
            if hosted is not None and hosted.base_url not in allowed:
                raise DeniedError(
                    f"{spec.name}: {hosted.base_url} is not among the hosted APIs of this cluster.",
                    hint="The operator allows them in metadata.raytide.gateway.hosted of cluster.yaml.",
                )

    def change_adapters(self, name: str, body: Mapping[str, object], caller: Caller) -> EndpointStatus:
        """Loads and unloads adapters on the running replicas. Concurrent changes are applied one after another."""
        change = AdapterChange.parse(body, where="adapters")
        with self._changing:
            now = self.get(name, caller)
            spec = now.endpoint.spec
            fields = {**spec.model_dump(mode="json"), "adapters": change.applied_to(spec)}
            return self.serve(fields, caller, str(change), seen=now.revision)

    def delete(self, name: str, caller: Caller) -> EndpointStatus:
        caller.require_team(self._store.endpoint(name).spec.team)
        self._store.request_delete(name)
        return self.get(name, caller)
