"""The API's operations on registered models and datasets, without HTTP."""

from __future__ import annotations

from collections.abc import Mapping

from raytide.control.api.auth import Caller
from raytide.control.api.services.input_check import Inputs
from raytide.control.api.services.limits import LimitsService
from raytide.control.api.services.submission_rate import SubmissionRate
from raytide.core.bounds import printable
from raytide.core.clock import Clock
from raytide.core.config import raytide_version
from raytide.core.errors import ConfigError, ConflictError
from raytide.core.io.storage import check_url, local_path
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.objects.job import JobKind
from raytide.core.specs.data import DatasetUse, DatasetVersion, DatasetVersionSpec, RegisteredDataset
from raytide.core.specs.model_version import (
    SCHEME,
    AliasChange,
    AliasSpec,
    ModelReference,
    ModelVersion,
    ModelVersionSpec,
    PromotionRule,
    RegisteredModel,
)
from raytide.core.state import Store
from raytide.registry.lineage import with_lineage
from raytide.registry.rollout.ab_test import last_look
from raytide.registry.rollout.promotion import decide_promotion

_MOST_WHY = 256


class ModelService:
    """Registers, shows and promotes models of the caller's team. A caller with a token for all teams can do so for any
    team."""

    def __init__(
        self, store: Store, clock: Clock, inputs: Inputs, accounts: LimitsService, rate: SubmissionRate
    ) -> None:
        self._store, self._clock, self._inputs, self._accounts, self._rate = store, clock, inputs, accounts, rate
        self._records = store.models

    def register(self, body: Mapping[str, object], caller: Caller) -> ModelVersion:
        """Adds a version of a model. If the version names the job that made it, the lineage is taken from that job's
        record."""
        spec = ModelVersionSpec.parse({"team": caller.home, **body}, where="model")
        caller.require_team(spec.team)
        self._accounts.check_team(spec.team)
        if spec.lineage.job:
            job = caller.acting_on(self._store.job(spec.lineage.job))
            if job.spec.team != spec.team:
                raise ConfigError(
                    f"{job.id} belongs to team {job.spec.team}.", hint="Register the model for that team."
                )
            spec = with_lineage(spec, job, f"raytide {raytide_version()}")
        self._inputs.check_private(spec.location, spec.name, is_checked_later=False)
        if local_path(spec.location) is None:
            check_url(spec.location)
        else:
            self._inputs.check_registered(spec.location, caller)
        self._rate.take_change(spec.team, len(spec.model_dump_json()))
        return self._records.register(spec, caller.user, self._clock.now_s())

    def promote(self, name: str, alias: str, body: Mapping[str, object], caller: Caller) -> AliasChange:
        """Points an alias of a model at another version, or removes the alias. Raises ConflictError if the version does
        not satisfy the promotion rule in `body`."""
        reference = ModelReference.parse(f"{name}@{alias}")
        change = AliasSpec.parse(body, where="promote")
        team = self._owned(name, caller.require_person())
        self._rate.take_change(team)
        if change.rule is not None and change.version is not None:
            change = self._judged(reference, change, change.version, change.rule, team)
        return self._records.promote(name, reference.alias, change, caller.user, self._clock.now_s())

    def _judged(
        self, alias: ModelReference, change: AliasSpec, version: int, rule: PromotionRule, team: str
    ) -> AliasSpec:
        """Returns the change with the rule's reasons added, valid only while the alias names the version that it names
        now. Raises ConflictError if the rule rejects the change."""
        challenger = self._records.find(ModelReference(alias.name, version))
        named = self._records.models(name=alias.name)[0].aliases.get(alias.alias)
        if named == version:  # as after a request whose response was lost
            return change
        champion = None if named is None else self._records.find(ModelReference(alias.name, named))
        test = None
        if champion is not None:
            test = self._store.rollouts.last_test(team=team, champion=champion.id, challenger=challenger.id)
        known = None if champion is None else champion.spec.metrics
        decision = decide_promotion(
            rule, known, challenger.spec.metrics, None if test is None else last_look(test.progress)
        )
        reasons = "; ".join(decision.reasons)
        if not decision.promotes:
            raise ConflictError(
                f"{challenger.id} does not become {alias}: {reasons}.", hint="Leave out the rule to promote it anyway."
            )
        if change.if_version not in (None, named or 0):
            return change  # the store says that another version is named
        why = printable("; ".join(filter(None, [change.why, reasons])), _MOST_WHY)
        return change.model_copy(update={"why": why, "if_version": named or 0})

    def version(self, name: str, which: str, caller: Caller) -> ModelVersion:
        """Returns a version by its number or by an alias."""
        reference = ModelReference.parse(f"{name}{':' if which.isdigit() else '@'}{which}")
        self._owned(name, caller)
        return self._records.find(reference)

    def versions(self, name: str, caller: Caller, limit: int, offset: int) -> tuple[ModelVersion, ...]:
        self._owned(name, caller)
        return self._records.versions(name, limit=limit, offset=offset)

    def all(self, caller: Caller, limit: int, offset: int) -> tuple[RegisteredModel, ...]:
        return self._records.models(team=caller.only_team, limit=limit, offset=offset)

    def get(self, name: str, caller: Caller) -> RegisteredModel:
        self._owned(name, caller)
        return self._records.models(name=name)[0]

    def history(
        self, name: str, caller: Caller, alias: str | None, until_s: float | None, limit: int
    ) -> tuple[AliasChange, ...]:
        self._owned(name, caller)
        return self._records.history(name, alias=alias, until_s=until_s, limit=limit)

    def resolved(self, spec: ServeSpec, caller: Caller) -> ServeSpec:
        """Returns the spec with each reference to a registered model or adapter replaced by the registered location.
        The returned spec also names the version of the registered model.

        A stored spec names both a model and a version. In such a spec the model must be the registered location of
        the version.
        """
        adapters = {name: self._located(location, caller) for name, location in spec.adapters.items()}
        spec = spec.model_copy(update={"adapters": adapters, "weights": self._located(spec.weights, caller)})
        if not spec.model.startswith(SCHEME) and not spec.version:
            return spec
        reference = ModelReference.parse(spec.version or spec.model)
        self._owned(reference.name, caller)
        found = self._records.find(reference)
        if spec.version and spec.model != found.spec.location:
            raise ConfigError(
                f"{spec.version} lies at {found.spec.location}, not at {spec.model}.",
                hint=f"Leave out `version`, and write `model: {SCHEME}{spec.version}`.",
            )
        return spec.model_copy(update={"model": found.spec.location, "version": found.id})

    def _located(self, location: str, caller: Caller) -> str:
        """Returns the location of the registered version that a reference names; any other location unchanged."""
        if not location.startswith(SCHEME):
            return location
        reference = ModelReference.parse(location)
        self._owned(reference.name, caller)
        return self._records.find(reference).spec.location

    def _owned(self, name: str, caller: Caller) -> str:
        """Returns the model's team. Raises DeniedError if the caller may not see it."""
        caller.require_team(team := self._records.owner(name))
        return team


class DatasetService:
    """Registers and shows datasets of the caller's team. A caller with a token for all teams can do so for any team."""

    def __init__(self, store: Store, clock: Clock, accounts: LimitsService, rate: SubmissionRate) -> None:
        self._store, self._clock, self._accounts, self._rate = store, clock, accounts, rate
        self._records = store.datasets

    def register(self, body: Mapping[str, object], caller: Caller) -> DatasetVersion:
        """Adds a version of a dataset, or returns the existing version with the same manifest. If the request names the
        job that built the dataset, the version keeps that job's configuration."""
        spec = DatasetVersionSpec.parse({"team": caller.home, **body}, where="dataset")
        caller.require_team(spec.team)
        self._accounts.check_team(spec.team)
        config: dict[str, object] = {}
        if spec.job:
            job = caller.acting_on(self._store.job(spec.job))
            if job.spec.team != spec.team:
                raise ConfigError(
                    f"{job.id} belongs to team {job.spec.team}.", hint="Register the dataset for that team."
                )
            if job.spec.kind is JobKind.DATA:
                config = dict(job.spec.config)
        spec = spec.model_copy(update={"config": config})
        self._rate.take_change(spec.team, len(spec.model_dump_json()))
        return self._records.register(spec, caller.user, self._clock.now_s())

    def all(self, caller: Caller, limit: int, offset: int) -> tuple[RegisteredDataset, ...]:
        """Returns the datasets in the order of their names, each with its newest version."""
        return self._records.datasets(team=caller.only_team, limit=limit, offset=offset)

    def versions(self, name: str, caller: Caller, limit: int, offset: int) -> tuple[DatasetVersion, ...]:
        """Returns versions of a dataset, newest first."""
        caller.require_team(self._records.find(name).spec.team)
        return self._records.versions(name, limit=limit, offset=offset)

    def version(self, name: str, number: int | None, caller: Caller) -> DatasetVersion:
        """Returns the version of a dataset with this number. Without a number, returns the newest version."""
        caller.require_team((found := self._records.find(name, number)).spec.team)
        return found

    def uses(self, name: str, number: int, caller: Caller) -> DatasetUse:
        """Returns the jobs that read a version of a dataset, and the models that were trained on it."""
        return self._records.uses(self.version(name, number, caller).spec)
