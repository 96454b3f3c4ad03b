"""The API's operations on registered datasets, without HTTP."""

from __future__ import annotations

from collections.abc import Mapping

from raytide.control.api.auth import Caller
from raytide.control.api.services.limits import LimitsService
from raytide.control.api.services.submission_rate import SubmissionRate
from raytide.core.clock import Clock
from raytide.core.errors import ConfigError
from raytide.core.objects.job import JobKind
from raytide.core.specs.data import DatasetUse, DatasetVersion, DatasetVersionSpec, RegisteredDataset
from raytide.core.state import Store


class DatasetService:
    """Users see the datasets of their own team, and with a token for all teams those of all."""

    def __init__(self, store: Store, clock: Clock, accounts: LimitsService, rate: SubmissionRate) -> None:
        self._store, self._clock, self._accounts, self._rate = store, clock, accounts, rate
        self._records = store.datasets

    def register(self, body: Mapping[str, object], caller: Caller) -> DatasetVersion:
        """Adds a version; the same one again is the version that exists. If it names a job, the job's spec is kept."""
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
        """Returns datasets by name, each with its newest version."""
        return self._records.datasets(team=caller.only_team, limit=limit, offset=offset)

    def versions(self, name: str, caller: Caller, limit: int, offset: int) -> tuple[DatasetVersion, ...]:
        """Returns versions of a dataset, newest first."""
        caller.require_team(self._records.find(name).spec.team)
        return self._records.versions(name, limit=limit, offset=offset)

    def version(self, name: str, number: int | None, caller: Caller) -> DatasetVersion:
        """Returns a version, or the newest one."""
        caller.require_team((found := self._records.find(name, number)).spec.team)
        return found

    def uses(self, name: str, number: int, caller: Caller) -> DatasetUse:
        """Returns the jobs that read a version, and the models that were made of it."""
        return self._records.uses(self.version(name, number, caller).spec)
