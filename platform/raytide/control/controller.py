"""The controller: a loop that loads the records, observes the cluster, decides, persists the intents and applies them.

It may be killed at any point: it only starts actions whose intent is persisted, and the next controller executes
persisted intents.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from raytide.autoscaler.deadlines.jobs import with_market_constraints
from raytide.autoscaler.endpoints.traffic import TrafficMonitor
from raytide.autoscaler.job_throughput import JobThroughput
from raytide.autoscaler.nodes import launch_backoff
from raytide.autoscaler.nodes.idleness import IdleClock
from raytide.autoscaler.signals import with_signals
from raytide.control.accounting.billing_intervals import Booking, energy_of, update_intervals
from raytide.control.accounting.lost_work import book_losses, settled_losses
from raytide.control.accounting.restored_records import step_hold
from raytide.control.accounting.team_usage import team_usage, with_team_usage
from raytide.control.reconcile.apply import ApplyResult, apply, log_plan
from raytide.control.reconcile.decide import data_costs, decide_constrained, waiting_reasons
from raytide.control.reconcile.decision_inputs import DecisionInputs
from raytide.control.reconcile.driver_silence import DriverSilence
from raytide.control.reconcile.intents import record_intents
from raytide.control.reconcile.learned_state import Knowledge, LearnedState
from raytide.control.reconcile.observation import ClusterObservation, LastReplicas, Sources, at_controller_time, observe
from raytide.control.reconcile.quarantine import Quarantine
from raytide.control.reconcile.records import (
    ClusterRecords,
    advance,
    changes,
    has_drivers,
    has_gangs,
    metered,
    served_names,
    take_snapshot,
)
from raytide.control.reconcile.retry_loop import RetryLoop, is_idle, wait_for_lead
from raytide.control.reconcile.serve_sync import ServeSync, follow_serve
from raytide.control.reconcile.snapshot_request import answer_request
from raytide.control.supervision.wake_pipe import REST_S, WakePipe
from raytide.control.views import Live, TeamUse, Waiting, last_pass_s, to_json
from raytide.core.clock import Clock, SystemClock
from raytide.core.io.atomic_file import write_json
from raytide.core.logs import log_to, logger
from raytide.core.money import month_of, to_us
from raytide.core.objects.cluster_config import ClusterConfig, load_cluster
from raytide.core.objects.endpoint import Endpoint
from raytide.core.objects.plan import Admit, Plan, Wait
from raytide.core.objects.snapshot import Snapshot
from raytide.core.state import Changes, Store
from raytide.core.state.write import REMOVED_AT_ONCE
from raytide.core.telemetry.job_trace import JobTraces
from raytide.ledger.occupancy import RecentlyReleased, holders, occupancies
from raytide.queue.admission.priority import LAST_SHARE
from raytide.queue.admission.scheduler import queued_jobs
from raytide.queue.admission.start_forecast import forecast_starts
from raytide.registry.rollout.lifecycle import advance_all, judged_by, losing_endpoints, with_shares
from raytide.registry.rollout.routes import EndpointRoute, routes

log = logger(__name__)

GC_THRESHOLDS = (100_000, 20, 20)
"""The thresholds of Python's garbage collector. A tick on a large cluster makes a million short-lived objects, for
which the default thresholds collect far too often.
"""

_REMOVE_S = 3600.0
_DAY_S = 86_400.0
_FORECAST_S = 10.0
"""The longest age of a start forecast, in seconds."""


class Controller:
    """The control loop of a cluster: observe, decide, record, apply.

    `tick` is one pass. `run` repeats the pass every `tick_s` seconds, and at once when the provider reports an
    event. In an idle cluster, `run` waits until the API stores a change, but at most REST_S seconds.
    """

    def __init__(self, store: Store, config: ClusterConfig, sources: Sources, clock: Clock, live_path: Path) -> None:
        self._store, self._config, self._sources, self._clock = store, config, sources, clock
        self._live_path = live_path
        self._node_types = {node_type.name: node_type for node_type in config.node_types}
        self._serve_sync = ServeSync(sources.serve, store.check_lead)
        self._idle, self._departures, self._silence = IdleClock(), RecentlyReleased(), DriverSilence()
        self._learned = LearnedState(live_path.with_name("learned.json"))
        known = self._learned.known
        self._traffic = TrafficMonitor(config.node_types, known.speeds, known.starts)
        self._throughput = JobThroughput(config.node_types, known.strides)
        self._names: Mapping[str, str] = {}
        self._inputs = DecisionInputs(store, config, clock.now_s(), known.fleets)
        self._quarantine = Quarantine()
        self._wake, self._wake_pipe = threading.Event(), WakePipe(live_path.parent)
        self._stopped, self._is_idle = False, False
        self._forecast: tuple[float, Mapping[str, float]] = (0.0, {})
        self._ticks = self._errors = 0
        self._remove_at_s = 0.0
        self._retry_loop = RetryLoop(config.settings.tick_s)
        self._traces = JobTraces(config.settings.tracing, store)
        self._live = Live(at_s=0.0)
        self._last_replicas = LastReplicas()

    def run(self) -> None:
        self._sources.provider.watch(self._wake_up)
        while not self._stopped:
            self._wake.clear()
            pause_s = self._retry_loop.attempt(self.tick, self._publish_failure)
            if not self._wake.wait(pause_s) and self._is_idle:
                self._wake_pipe.rest(REST_S - pause_s)
        self._wake_pipe.close()
        self._serve_sync.close()
        self._traces.close()
        self._sources.meters.close()
        self._sources.provider.close()

    def stop(self) -> None:
        """Ends the loop after the current tick. This method is safe in a signal handler."""
        self._stopped = True
        self._wake_up()

    def _wake_up(self) -> None:
        self._wake.set()
        self._wake_pipe.write()

    def tick(self) -> Plan:
        """Runs one pass of the loop, and returns the plan of the pass.

        Raises only if the store fails, because nothing may be done without the store. The next tick observes everything
        again.
        """
        began_s = time.monotonic()
        now_s, wall_ahead_s = self._clock.now_s(), self._clock.wall_ahead_s()
        stored = self._store.load()
        if why := step_hold(self._store, stored, self._sources.provider.machines, self._node_types, now_s):
            self._ticks += 1
            self._live = replace(self._live, at_s=now_s, errors=(why,), ticks=self._ticks)
            self._write(self._live)
            return Plan(at_s=now_s)
        records = ClusterRecords.of(stored)
        observed = self._observe(records, now_s, wall_ahead_s)
        if observed.ray_nodes is not None:
            self._idle = self._idle.observe(observed.ray_nodes, now_s)
        self._idle = self._idle.observe_meters(observed.use, metered(records, self._node_types))
        self._quarantine.begin_tick(records.jobs, records.endpoints, now_s)
        specs = {name: endpoint.spec for name, endpoint in records.endpoints.items()}
        scheduled = {name: endpoint.at(now_s + wall_ahead_s) for name, endpoint in records.endpoints.items()}
        records.endpoints = self._quarantine.attempt(
            "rollouts",
            lambda: with_shares(scheduled, records.rollouts.values(), observed.loads),
            records.endpoints,
        )
        advance(records, observed, now_s, self._quarantine.guard)
        for name, endpoint in records.endpoints.items():
            move = partial(follow_serve, endpoint, observed, self._serve_sync.served, now_s)
            records.endpoints[name] = self._quarantine.guard(endpoint, move, endpoint, now_s)
        self._quarantine.attempt("rollouts", lambda: self._advance_rollouts(records, scheduled, observed, now_s), None)
        snapshot = take_snapshot(records, observed, self._idle, self._config, now_s, wall_ahead_s)
        decided_on, plan = self._decide(snapshot, records, observed)
        record_intents(records, plan, self._node_types)
        records.endpoints = {name: replace(e, spec=specs[name]) for name, e in records.endpoints.items()}
        if observed.ray_nodes is not None:
            self._departures = self._departures.observe(holders(snapshot), now_s)
        booking = self._quarantine.attempt(
            "ledger", lambda: self._book_costs(records, observed, snapshot, now_s), None
        ) or records.book_later(stored.nodes)
        self._store.commit(changes(stored, records, booking, plan, now_s))
        self._sources.meters.energy.settle(energy_of(booking.entries), booking.closed)
        log_plan(plan)
        result = apply(records, plan, observed, self._sources, self._node_types, now_s, self._store.check_lead)
        routed = self._quarantine.attempt(
            "rollouts", lambda: routes(stored.serving, records.rollouts.values()), dict[str, EndpointRoute]()
        )
        self._serve_sync.sync(records.endpoints.values(), routed)
        self._quarantine.attempt("traces", lambda: self._traces.export(stored.jobs, records.jobs), None)
        if result.nodes or result.orders:
            self._record(records, result, now_s)
        self._remove_old_records(now_s)
        self._is_idle = is_idle(snapshot, plan)
        self._publish(decided_on, plan, observed, result, time.monotonic() - began_s)
        return plan

    def _advance_rollouts(
        self, records: ClusterRecords, scheduled: Mapping[str, Endpoint], observed: ClusterObservation, now_s: float
    ) -> None:
        before = records.rollouts.values()
        counts = self._store.rollouts.counts(each.number for each in before if each.state.is_live)
        feedback = self._store.feedback
        live = [(r, *judged_by(r)) for r in before if r.state.is_live]
        liked = {r.number: feedback.groups(r.name, r.created_at_s, metric) for r, metric, _ in live if r.kind == "ab"}
        bad = {r.number: feedback.bad_values(r.name, limits, r.created_at_s) for r, _, limits in live if limits}
        endpoints = {name: replace(each, spec=scheduled[name].spec) for name, each in records.endpoints.items()}
        records.rollouts = advance_all(before, endpoints, observed.loads, counts, now_s, liked, bad)
        records.endpoints |= losing_endpoints(records.rollouts.values(), records.endpoints, now_s)

    def _decide(
        self, snapshot: Snapshot, records: ClusterRecords, observed: ClusterObservation
    ) -> tuple[Snapshot, Plan]:
        """Returns the decision's input and the plan. Records that make a step raise are left out of both."""
        now_s = snapshot.at_s

        def learn(snapshot: Snapshot) -> Snapshot:
            snapshot = self._inputs.add_to(snapshot, records.nodes.values(), observed.prices)
            self._throughput.observe(snapshot, now_s)
            return replace(snapshot, paces=self._throughput.paces(snapshot.jobs))

        snapshot, learned = self._quarantine.run_stage("learning", learn, snapshot)
        snapshot = learned or snapshot
        known = Knowledge(
            self._traffic.learned, self._traffic.starts, self._inputs.fleets.learned, self._throughput.learned
        )
        self._quarantine.attempt("learning", lambda: self._learned.save(known, now_s), None)
        spent = self._store.books.spent([job.id for job in snapshot.jobs], month_of(to_us(now_s)))
        old_s = self._store.census.oldest_s(LAST_SHARE, now_s)

        def decide(snapshot: Snapshot) -> tuple[Snapshot, Plan]:
            snapshot = with_market_constraints(with_team_usage(snapshot, self._config, records.teams, spent, old_s))
            return snapshot, decide_constrained(snapshot)

        snapshot, decided = self._quarantine.run_stage("decision", decide, snapshot)
        snapshot, plan = (snapshot, None) if decided is None else decided
        return snapshot, self._quarantine.end_tick(plan, now_s)

    def _observe(self, records: ClusterRecords, now_s: float, wall_ahead_s: float) -> ClusterObservation:
        observed = observe(
            self._sources,
            endpoints=served_names(records),
            with_drivers=has_drivers(records),
            with_gangs=has_gangs(records),
            names=self._names,
        )
        self._names = observed.names
        observed = at_controller_time(observed, wall_ahead_s)
        if observed.api_answers:
            observed = replace(observed, silent_s=self._silence.observe(records.jobs.values(), now_s))
        else:
            self._silence.forget()
        if observed.machines is not None:
            nodes = metered(records, self._node_types)
            living = [m for m in observed.machines if m.ended_at_s is None]
            self._sources.meters.watch(
                [m for m in living if m.node_id in nodes],
                self._idle.since_s,
                [m for m in living if m.node_id not in nodes],
            )
        loads = self._quarantine.attempt(
            "traffic",
            lambda: self._traffic.with_traffic(observed.loads, records.endpoints.values(), records.nodes.values()),
            dict(observed.loads),
        )
        hosts = {node.ray_node_id: node.id for node in records.nodes.values() if node.ray_node_id}
        endpoints, measured = records.endpoints.values(), (observed.use, observed.measured)
        loads = self._quarantine.attempt(
            "signals", lambda: with_signals(loads, endpoints, records.signals, hosts, *measured, now_s), loads
        )
        return replace(observed, loads=loads)

    def _book_costs(
        self, records: ClusterRecords, observed: ClusterObservation, snapshot: Snapshot, now_s: float
    ) -> Booking:
        if observed.machines is None:
            return Booking((), (), ())
        machines = {machine.node_id: machine for machine in observed.machines}
        books, told = self._store.books, settled_losses(records.jobs.values(), now_s)
        booking = update_intervals(
            records.nodes,
            machines,
            records.intervals,
            occupancies(snapshot, self._departures.held),
            lambda node_id, end_us: books.entries(node_id=node_id, ending_after_us=end_us),
            to_us(now_s),
            at_once=told,
            pending_mj=self._sources.meters.energy.pending_mj(),
        )
        losses = book_losses(
            [records.jobs[job_id] for job_id in sorted(told)],
            booking.entries,
            lambda job_id, after_us: books.entries(subject=job_id, ending_after_us=after_us),
            now_s,
        )
        records.jobs |= {job.id: job for job in losses.jobs}
        return replace(booking, entries=(*booking.entries, *losses.entries))

    def _record(self, records: ClusterRecords, result: ApplyResult, now_s: float) -> None:
        """Persists the changes that only applying the plan revealed, and their effect on launch back-off."""
        before = [records.nodes[node_id] for node_id in result.nodes]
        rested = launch_backoff.update_pools(tuple(records.pools.values()), before, result.nodes.values(), now_s)
        changed = tuple(pool for pool in rested if records.pools.get((pool.node_type, pool.zone)) != pool)
        nodes = tuple(result.nodes.values())
        self._store.commit(Changes(at_s=now_s, nodes=nodes, pools=changed, orders=tuple(result.orders)))

    def _remove_old_records(self, now_s: float) -> None:
        """Deletes a batch of records past their retention once an hour; after a full batch, again in the next tick."""
        if now_s < self._remove_at_s:
            return
        settings = self._config.settings
        removed = self._store.remove_old_jobs(now_s - settings.job_retention_days * _DAY_S)
        gateway = settings.gateway
        usage_s, audit_s = gateway.usage_retention_days * _DAY_S, gateway.audit_retention_days * _DAY_S
        self._store.feedback.prune(now_s - usage_s)
        has_more = self._store.tenancy.prune(now_s - usage_s, now_s - audit_s, now_s)
        self._remove_at_s = now_s if has_more or removed == REMOVED_AT_ONCE else now_s + _REMOVE_S

    def _publish(
        self, snapshot: Snapshot, plan: Plan, observed: ClusterObservation, result: ApplyResult, tick_s: float
    ) -> None:
        served = self._serve_sync.served
        queued = {job.id for job in queued_jobs(snapshot)}
        attempt = self._quarantine.attempt
        starts = attempt("forecast", lambda: dict(self._forecast_starts(snapshot, plan)), dict[str, float]())
        waiting = attempt("reasons", lambda: waiting_reasons(snapshot, plan, starts), dict[str, Waiting]())
        data = attempt("data costs", lambda: data_costs(snapshot), dict[str, str]())
        used = attempt("teams", lambda: team_usage(snapshot), dict[str, TeamUse]())
        errors = (*observed.errors, *result.errors, *(served.errors if served else ()), *self._quarantine.errors)
        self._ticks, self._errors = self._ticks + 1, self._errors + len(errors)
        observed = self._last_replicas.shown(observed, snapshot.at_s)
        live = Live(
            at_s=snapshot.at_s,
            waiting=waiting,
            queue=tuple(
                a.job_id if isinstance(a, Admit) else a.subject
                for a in plan.actions
                if isinstance(a, Admit) or (isinstance(a, Wait) and a.subject in queued)
            ),
            teams=used,
            stances=snapshot.stances,
            data=data,
            loads=observed.loads,
            use=observed.use,
            targets=observed.targets,
            measured=observed.measured,
            errors=(*errors, *observed.problems),
            quarantined={subject: entry.kind for subject, entry in self._quarantine.held.items()},
            ticks=self._ticks,
            tick_s=tick_s,
            errors_total=self._errors,
        )
        self._live = live
        self._write(live)
        try:
            answer_request(self._live_path.parent, snapshot)
        except OSError as error:
            log.warning("cannot write the snapshot", extra={"error": str(error)})

    def _write(self, live: Live) -> None:
        """Writes live.json. Without disk space the API keeps showing the previous file and its age."""
        try:
            write_json(self._live_path, to_json(live), is_kept=False)
        except OSError as error:
            log.warning("cannot write live.json", extra={"path": str(self._live_path), "error": str(error)})

    def _publish_failure(self, why: str) -> None:
        """Writes the last observation to live.json with the reason why no decision is made."""
        self._errors += 1
        self._silence.forget()  # heartbeats may not have been stored meanwhile
        self._write(replace(self._live, errors=(why, *self._live.errors), errors_total=self._errors))

    def _forecast_starts(self, snapshot: Snapshot, plan: Plan) -> Mapping[str, float]:
        """Returns when waiting jobs would start, in seconds. The forecast is reused for a while, because it is slow."""
        at_s, found = self._forecast
        if not any(isinstance(action, Wait) for action in plan.actions):
            return {}
        if not 0 <= snapshot.at_s - at_s < _FORECAST_S:
            at_s, found = self._forecast = snapshot.at_s, forecast_starts(snapshot)
        return {job_id: max(0.0, at_s + in_s - snapshot.at_s) for job_id, in_s in found.items()}


def main(run_dir: str) -> None:
    """Runs the controller of one cluster: `python -m raytide.control.controller RUN_DIR`."""
    from raytide.control.bootstrap.cluster_record import load
    from raytide.control.bootstrap.wiring import sources
    from raytide.control.supervision.daemon import hold_lock

    folder = Path(run_dir)
    cluster = load(folder)
    assert cluster is not None, run_dir
    log_to()
    gc.set_threshold(*GC_THRESHOLDS)
    with hold_lock(folder / "controller.lock"):
        config, clock, live_path = load_cluster(cluster.config_path), SystemClock(), folder / "live.json"
        clock.go_on_from(last_pass_s(live_path))
        store = Store.open(cluster.state_url, head_epoch=cluster.head_epoch)
        wait_for_lead(store, cluster.holder, clock, live_path)
        controller = Controller(store, config, sources(cluster), clock, live_path)
        signal.signal(signal.SIGTERM, lambda *_: controller.stop())
        controller.run()
        store.resign()


if __name__ == "__main__":
    main(sys.argv[1])
