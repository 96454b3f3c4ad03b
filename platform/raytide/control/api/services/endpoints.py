"""The API's operations on endpoints, without HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from raytide.actors.serving.engines import choose_engine
from raytide.autoscaler.endpoints.load_target import cold_start_s
from raytide.control.api.auth import Caller
from raytide.control.api.services.input_check import Inputs
from raytide.control.api.services.limits import LimitsService
from raytide.control.api.services.models import ModelService
from raytide.control.api.services.submission_rate import SubmissionRate
from raytide.control.views import EndpointStatus, Live
from raytide.core.clock import Clock
from raytide.core.errors import ConflictError
from raytide.core.money import to_us
from raytide.core.objects.cluster_config import ClusterConfig
from raytide.core.objects.endpoint import EndpointRevision, ServeSpec
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.resources import resolve_accelerator
from raytide.core.state import Store
from raytide.ledger.cost import accrued, costs
from raytide.scheduling.diagnosis import check_possible


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
    ) -> None:
        self._store, self._config, self._clock, self._live = store, config, clock, live
        self._inputs, self._accounts, self._serve_url = inputs, accounts, serve_url
        self._models, self._rate = models, rate

    def serve(self, body: Mapping[str, object], caller: Caller, why: str = "") -> EndpointStatus:
        spec = ServeSpec.parse({"team": caller.home, **body}, where="serve")
        caller.require_team(spec.team)
        spec = self._models.resolved(spec, caller)
        self._accounts.check_team(spec.team)
        if spec.priority is not None:
            self._accounts.check_priority(spec.priority)
        labels = resolve_accelerator(spec.labels, self._config.node_types)
        spec = spec.model_copy(update={"labels": labels})
        choose_engine(spec)
        self._inputs.check_private(spec.model_dump(), spec.name, is_checked_later=False)
        shape = Shape(members=max(1, spec.replicas.min) * spec.members, resources=spec.resources, labels=spec.labels)
        check_possible(GangSpec(shapes=(shape,)), self._config.node_types, subject=f"endpoint {spec.name}")
        self._inputs.check_model(spec.model, caller)
        self._rate.take_change(spec.team, len(spec.model_dump_json()))
        self._store.save_endpoint(spec, caller.user, self._clock.now_s(), why)
        return self.get(spec.name, caller)

    def all(self, caller: Caller) -> list[EndpointStatus]:
        booked = self._store.books.booked("endpoint", team=caller.only_team)
        pending = accrued(self._store.books.intervals(), to_us(self._clock.now_s()))
        spent = costs(booked, (entry for entry in pending if caller.sees(entry.team)), "endpoint")
        live = self._live()
        return [
            EndpointStatus(
                endpoint=endpoint,
                base_url=f"{self._serve_url}/{endpoint.name}/v1",
                ready_replicas=load.ready if (load := live.loads.get(endpoint.name)) else 0,
                ongoing=load.ongoing if load else 0.0,
                cost_micro_usd=spent.get(endpoint.name, 0),
                waiting=live.waiting.get(endpoint.name),
                cold_start_s=cold_start_s(endpoint.spec.replicas, load),
                cold_start_is_learned=bool(load and load.traffic and load.traffic.cold_start_s is not None),
                paces=load.traffic.paces if load and load.traffic else {},
                startups=load.startups if load else (),
            )
            for endpoint in self._store.endpoints(ended=True)
            if caller.sees(endpoint.spec.team)
        ]

    def get(self, name: str, caller: Caller) -> EndpointStatus:
        caller.require_team(self._store.endpoint(name).spec.team)
        return next(status for status in self.all(caller) if status.endpoint.name == name)

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

    def delete(self, name: str, caller: Caller) -> EndpointStatus:
        caller.require_team(self._store.endpoint(name).spec.team)
        self._store.request_delete(name)
        return self.get(name, caller)
