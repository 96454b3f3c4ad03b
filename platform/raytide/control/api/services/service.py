"""The API's service, without HTTP: jobs, endpoints, and the cluster as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from raytide.autoscaler.providers.base import Bill
from raytide.control.accounting.final_accounting import cost_report
from raytide.control.api.auth import Caller
from raytide.control.api.health import HealthMonitor
from raytide.control.api.services.endpoints import EndpointService
from raytide.control.api.services.input_check import Inputs
from raytide.control.api.services.jobs import JobService
from raytide.control.api.services.limits import LimitsService
from raytide.control.api.services.metrics.page import ApiMetrics
from raytide.control.api.services.registry import DatasetService, ModelService
from raytide.control.api.services.submission_rate import SubmissionRate
from raytide.control.api.services.tenancy import TenancyService
from raytide.control.api.services.uploads import Packages
from raytide.control.drivers.ray_jobs import RayJobs
from raytide.control.reconcile.snapshot_request import request_snapshot
from raytide.control.supervision.wake_pipe import wake_controller
from raytide.control.views import ClusterStatus, CostReport, CostTable, Live, TeamView
from raytide.core.clock import Clock
from raytide.core.money import to_us
from raytide.core.objects.cluster_config import ClusterConfig
from raytide.core.objects.ledger_entry import Entry
from raytide.core.state import Store
from raytide.core.telemetry.targets import Target, announced
from raytide.dashboards.alerts.service import MonitoringService
from raytide.dashboards.web.picture import Pictures
from raytide.dashboards.web.tide import Tide
from raytide.ledger.report import By, accrued, rates


class ApiService:
    """The service of one API process."""

    def __init__(
        self,
        store: Store,
        config: ClusterConfig,
        bill: Bill,
        drivers: RayJobs,
        clock: Clock,
        live: Path,
        serve_url: str,
        ray_url: str,
        ray_environment: Mapping[str, str],
        prometheus_url: str = "",
        alertmanager_url: str = "",
    ) -> None:
        self._store, self._config, self._bill = store, config, bill
        self._clock, self._live_path = clock, live
        self._serve_url, self._ray_url = serve_url, ray_url
        self._ray_environment = ray_environment
        self._prometheus_url, self._alertmanager_url = prometheus_url, alertmanager_url
        self.accounts = LimitsService(store, config)
        self.watch = HealthMonitor(live, store, clock)
        self._metrics = ApiMetrics(store, config, self.accounts, self.watch)
        self.client_latencies = self._metrics.client_latencies
        self.packages = Packages(live.parent / "packages")
        inputs = Inputs()
        rate = SubmissionRate()
        self.jobs = JobService(store, config, drivers, clock, self.live, inputs, self.accounts, self.packages, rate)
        self.models = ModelService(store, clock, inputs, self.accounts, rate)
        self.datasets = DatasetService(store, clock, self.accounts, rate)
        self.endpoints = EndpointService(
            store, config, clock, self.live, inputs, self.accounts, self.models, serve_url, rate, drivers
        )
        self.tenancy = TenancyService(store, clock, self.accounts, rate)
        self.monitoring = MonitoringService(live.parent, store, clock, config.settings.hosts)
        self.pictures = Pictures(
            store, config, clock, self.live, self.endpoints.all, self.teams, self.monitoring.alerts
        )
        self.tide = Tide(store, config, clock)

    def now_s(self) -> float:
        return self._clock.now_s()

    def status(self, caller: Caller) -> ClusterStatus:
        """Returns the cluster's status. The status has the costs of the caller's team, or of all teams if the caller
        has a token for all teams."""
        now = self._clock.now_s()
        live = self.live()
        nodes = self._store.nodes(live=True)
        booked = self._store.books.booked("team")
        pending = accrued(self._store.books.intervals(), to_us(now))
        burn = rates(self._store.books.intervals())
        heads = self._store.heads()
        return ClusterStatus(
            name=self._config.name,
            at_s=now,
            controller_age_s=self.watch.controller_age_s(),
            nodes=nodes[::-1],
            jobs=self._store.census.jobs(),
            endpoints=len(self._store.endpoints()),
            price_micro_usd_h=round(sum(rate for (_, _, team, _), rate in burn.items() if caller.sees(team))),
            cost_micro_usd=sum(amount for team, amount in booked.items() if caller.sees(team))
            + sum(entry.amount_micro_usd for entry in pending if caller.sees(entry.team)),
            ray=self._ray_url,
            ray_environment=self._ray_environment,
            serve=self._serve_url,
            prometheus=self._prometheus_url,
            alertmanager=self._alertmanager_url,
            head=_machine(heads.leader) if heads else "",
            standbys=tuple(map(_machine, heads.standbys)) if heads else (),
            errors=(*(trouble.text for trouble in self.watch.troubles()), *live.errors),
        )

    def plans(self, caller: Caller, limit: int, until_s: float | None) -> list[dict[str, object]]:
        """Returns the controller's latest plans. The caller needs a token for all teams, because plans show all jobs
        and their limits."""
        caller.require_all()
        return [
            {"at_s": plan.at_s, "last_at_s": plan.last_at_s, "actions": [dict(action) for action in plan.actions]}
            for plan in self._store.plans(limit=limit, until_s=until_s)
        ]

    def snapshot(self, caller: Caller) -> str:
        """Returns the input of the controller's next decision as JSON. The caller needs a token for all teams."""
        caller.require_all()
        return request_snapshot(self._live_path.parent)

    def cost(self, caller: Caller) -> CostReport:
        team = caller.only_team
        return cost_report(self._store.books, self._bill.machines(), to_us(self._clock.now_s()), team)

    def costs(self, by: By, caller: Caller, since_s: float) -> CostTable:
        return self.accounts.cost(by, caller, max(0, to_us(since_s)), to_us(self._clock.now_s()))

    def teams(self, caller: Caller) -> list[TeamView]:
        return self.accounts.teams(caller, self.live(), to_us(self._clock.now_s()))

    def fleet(self, caller: Caller, at_s: float) -> dict[str, object]:
        """Returns the nodes that existed at `at_s`, with the jobs and endpoints that held them, for the web page."""
        nodes = self._store.overview.nodes_at(at_s)
        return {
            "at_s": at_s,
            "nodes": self.pictures.earlier(nodes, self._store.overview.entries_at(to_us(at_s)), caller),
        }

    def ledger(
        self, caller: Caller, *, subject: str | None, node_id: str | None, until_s: float | None, limit: int
    ) -> tuple[Entry, ...]:
        """Returns a page of the ledger's entries, newest first. A team's token gets only the entries of that team."""
        until_us = None if until_s is None else to_us(until_s)
        which = {"subject": subject, "node_id": node_id, "team": caller.only_team, "until_us": until_us}
        return self._store.overview.entries(**which, limit=limit)  # type: ignore[arg-type]

    def metrics(self) -> bytes:
        """Returns the metrics in Prometheus' text format."""
        return self._metrics.page(self.live(), self._clock.now_s())

    def targets(self) -> list[Target]:
        """Returns the metrics pages that Prometheus and the monitor scrape. These are the pages that the head's
        processes have announced, and the pages of the nodes and replicas in the controller's last observation."""
        return [*announced(self._live_path.parent), *self.live().targets]

    def on_change(self) -> None:
        """Wakes an idle controller, so that the controller handles a change that the API has just stored."""
        wake_controller(self._live_path.parent)

    def health(self) -> dict[str, object]:
        """Returns the API's health. `troubles` lists only codes. The texts of the troubles contain paths, so only
        `status` shows them."""
        troubles = [trouble.code for trouble in self.watch.troubles()]
        return {"ok": True, "controller_at_s": self.live().at_s, "troubles": troubles}

    def live(self) -> Live:
        """Returns the controller's last observation. It is empty before the controller's first tick."""
        return self.watch.live()


def _machine(holder: str) -> str:
    """Returns the machine's name in a lease holder's name, `CLUSTER_ID@MACHINE`."""
    return holder.rpartition("@")[2]
