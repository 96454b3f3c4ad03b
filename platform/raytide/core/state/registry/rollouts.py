"""Rollouts in the store, and the application that serves each endpoint. For each revision of a rollout, gateways report
counts of requests, errors and delays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sqlalchemy as sa

from raytide.core.errors import ConflictError, NotFoundError
from raytide.core.objects.endpoint import Endpoint, EndpointState, ServeSpec
from raytide.core.specs.rollout import (
    CountedRevision,
    Rollout,
    RolloutKind,
    RolloutReport,
    RolloutState,
    Serving,
    application_of,
)
from raytide.core.state import codec
from raytide.core.state import tables as core
from raytide.core.state.caps import check_live_endpoints
from raytide.core.state.database import DatabaseAccess
from raytide.core.state.queries.jobs import chunked, no_endpoint
from raytide.core.state.records import Event
from raytide.core.state.registry import tables as t
from raytide.core.state.registry.feedback import thumbs
from raytide.core.state.registry.revisions import add_revision, revisions
from raytide.core.state.tenancy.audit import add_entry, record
from raytide.core.state.write import next_number, note, update, upsert

KEPT_ROLLOUTS = 100
"""The number of newest rollouts of an endpoint that are kept."""
_LIVE = [state for state in RolloutState if state.is_live]
_COUNTS = ("requests", "errors", "started", "late", "first_token_ms", "compared", "equal")
_FIELDS = codec.shared(Rollout, t.rollouts)


class RolloutRecords(DatabaseAccess):
    def start(
        self, spec: ServeSpec, kind: RolloutKind, plan: Mapping[str, Any], user: str, now_s: float, why: str
    ) -> Rollout:
        """Starts a rollout and returns it. Stores three records: a revision with this spec, an application that runs
        the revision with one replica, and the rollout. A repeated request returns the rollout that the first one
        started, while it is live.

        Raises NotFoundError if the endpoint does not exist. Raises ConflictError if the endpoint belongs to another
        team, has a rollout already or is being deleted, or if a hosted API answers for one of the revisions.
        """
        with self._db.write() as c:
            number = next_number(c, "rollout")
            champion, row, found = locked_serving(c, spec.name)
            if row is None or row.state == EndpointState.DELETED:
                raise no_endpoint(spec.name)
            if row.team != spec.team:
                raise ConflictError(f"endpoint {spec.name} belongs to team {row.team}.", hint="Choose another name.")
            if row.delete_requested or row.state == EndpointState.DELETING:
                raise ConflictError(f"endpoint {spec.name} is being deleted.", hint="Try again when it is deleted.")
            if spec.backend is not None or codec.endpoint(row).spec.backend is not None:
                hint = "Serve the new spec without a rollout. A model can have the API as its fallback."
                raise ConflictError(f"{spec.name}: a hosted API has no replicas, so no rollout.", hint=hint)
            if found is not None and _is_repeated(c, found, spec, kind, plan, user):
                return found
            refuse_during_rollout(found)
            revision = add_revision(c, spec, user, now_s, why, is_new=True)
            challenger = spec.model_copy(update={"name": application_of(spec.name, revision)})
            check_live_endpoints(c, challenger)
            values = {**codec.new_endpoint(challenger, user, now_s), "target_replicas": 1}
            upsert(c, core.endpoints, [values])
            made = Rollout(
                number=number,
                name=spec.name,
                team=spec.team,
                user=user,
                kind=kind,
                plan=dict(plan),
                champion=champion.revision,
                challenger=revision,
                champion_application=champion.application,
                challenger_application=challenger.name,
                created_at_s=now_s,
                why=why,
                reason="its first replica starts",
            )
            c.execute(t.rollouts.insert(), codec.values_of(made, _FIELDS))
            old = t.rollouts.c
            nth = sa.select(old.number).where(old.name == spec.name).order_by(old.number.desc())
            oldest_kept = nth.limit(1).offset(KEPT_ROLLOUTS - 1).scalar_subquery()
            ended = old.ended_at_s.is_not(None)
            c.execute(t.rollouts.delete().where(old.name == spec.name, old.number < oldest_kept, ended))
            note(c, [Event(now_s, challenger.name, "", "deploying", f"a {kind} of {spec.name}, requested by {user}")])
            shown = {"kind": kind, "from": champion.revision, "to": revision, "why": why, "version": spec.version}
            record(c, "rollout.start", spec.name, shown)
            return made

    def ask(self, name: str, end: str, user: str, why: str) -> Rollout:
        """Requests the end of an endpoint's live rollout. `end` is "stop" or "promote". A repeated request changes
        nothing.
        """
        with self._db.write() as c:
            found = live(c, name)
            if found is None:
                raise NotFoundError(f"endpoint {name} has no rollout that runs.", hint="`raytide serve NAME --canary`.")
            if found.asked == end:
                return found
            asked = {"asked": end, "asked_by": user, "asked_why": why}
            update(c, t.rollouts, {"number": found.number}, asked)
            record(c, f"rollout.{end}", name, {"to": found.challenger, "why": why})
            return _rollout(c.execute(t.rollouts.select().where(t.rollouts.c.number == found.number)).one())

    def page(self, name: str, *, team: str, limit: int = KEPT_ROLLOUTS) -> tuple[Rollout, ...]:
        """Returns the rollouts of an endpoint, newest first."""
        r = t.rollouts.c
        query = t.rollouts.select().where(r.name == name, r.team == team).order_by(r.number.desc()).limit(limit)
        return tuple(_rollout(row) for row in self._db.rows(query))

    def rolled_back(self, since_s: float, limit: int = 100) -> tuple[Rollout, ...]:
        """Returns the rollouts that were rolled back since this time, newest first."""
        r = t.rollouts.c
        query = t.rollouts.select().where(r.state == RolloutState.ROLLED_BACK, r.decided_at_s >= since_s)
        query = query.where(sa.or_(_unended(), r.ended_at_s >= since_s))  # which an index finds
        return tuple(_rollout(row) for row in self._db.rows(query.order_by(r.number.desc()).limit(limit)))

    def last_test(self, *, team: str, champion: str, challenger: str) -> Rollout | None:
        """Returns the team's newest A/B test of these two registered versions, or None if there is no such test."""
        r = t.rollouts.c
        query = t.rollouts.select().where(r.team == team, r.kind == "ab").order_by(r.number.desc())
        with self._db.read() as c:
            for found in (_rollout(row) for row in c.execute(query.limit(KEPT_ROLLOUTS))):
                numbers = (found.champion, found.challenger)
                kept = revisions(c, found.name, numbers)
                versions = {each.number: each.spec.version for each in kept if each.spec is not None}
                if [versions.get(number) for number in numbers] == [champion, challenger]:
                    return found
        return None

    def serving(self, name: str) -> Serving:
        """Returns the application and revision that serve an endpoint."""
        with self._db.read() as c:
            return serving(c, name)

    def all_serving(self) -> dict[str, Serving]:
        """Returns the application and the revision that serve each endpoint. The keys are the endpoints' names.
        Endpoints without a stored application and revision are left out.
        """
        with self._db.read() as c:
            return all_serving(c)

    def applications(self, names: Iterable[str]) -> tuple[Endpoint, ...]:
        """Returns the records of the applications with these names, including those of revisions that have ended. Names
        that do not exist are ignored."""
        with self._db.read() as c:
            which = (core.endpoints.select().where(core.endpoints.c.name.in_(part)) for part in chunked(names))
            return tuple(codec.endpoint(row) for query in which for row in c.execute(query))

    def report(self, report: RolloutReport) -> None:
        """Stores the counts that a gateway has made since its start. A report that is older than the last one changes
        nothing, because counts only grow."""
        columns = {"rollout", "revision", *_COUNTS}
        rows = [{**each.model_dump(include=columns), "gateway": report.gateway} for each in report.counted]
        with self._db.write() as c:
            known = {row.number for row in c.execute(sa.select(t.rollouts.c.number).where(_unended()))}
            rows = [row for row in rows if row["rollout"] in known]
            k = t.rollout_counts.c
            of_gateway = t.rollout_counts.select().where(k.gateway == report.gateway)
            before = {(row.rollout, row.revision): row._mapping for row in c.execute(of_gateway)}
            for row in rows:
                if (old := before.get((row["rollout"], row["revision"]))) is not None:
                    row.update({name: max(row[name], old[name]) for name in _COUNTS})
            upsert(c, t.rollout_counts, rows)

    def counts(self, numbers: Iterable[int]) -> dict[int, dict[int, CountedRevision]]:
        """Returns the counts of the requests to each revision, summed over the gateways. The outer key is the rollout's
        number, the inner key the revision's.
        """
        wanted = list(numbers)
        found: dict[int, dict[int, CountedRevision]] = {number: {} for number in wanted}
        k = t.rollout_counts.c
        sums = [sa.func.sum(k[name]).label(name) for name in _COUNTS]
        query = sa.select(k.rollout, k.revision, *sums).where(k.rollout.in_(wanted)).group_by(k.rollout, k.revision)
        if not wanted:
            return found
        with self._db.read() as c:
            for row in c.execute(query).mappings():
                values = {name: int(value) for name, value in row.items()}
                found[values["rollout"]][values["revision"]] = CountedRevision.model_validate(values)
            for number in wanted:
                _add_thumbs(c, number, found[number])
        return found


def _add_thumbs(c: sa.Connection, number: int, counts: dict[int, CountedRevision]) -> None:
    """Sets `judged` and `disliked` in the counts of a rollout's revisions to the judgements since the rollout began."""
    r, f = t.rollouts.c, t.feedback.c
    rollout = c.execute(t.rollouts.select().where(r.number == number)).first()
    if rollout is None:
        return
    which = f.revision.in_((rollout.champion, rollout.challenger))
    query = sa.select(f.revision, *thumbs()).where(f.model == rollout.name, which, f.at_s >= rollout.created_at_s)
    for row in c.execute(query.group_by(f.revision)):
        before = counts.get(row.revision) or CountedRevision(rollout=number, revision=row.revision)
        thumbed = {"judged": int(row.judged), "disliked": int(row.disliked)}
        counts[row.revision] = before.model_copy(update=thumbed)


def serving(c: sa.Connection, name: str) -> Serving:
    """Returns the application and the revision that serve an endpoint. If the store has no record of them, returns the
    endpoint's first application and the endpoint's newest revision.
    """
    row = c.execute(t.serving.select().where(t.serving.c.name == name)).first()
    if row is not None:
        return Serving(row.name, row.application, row.revision, row.previous)
    numbers = sa.select(t.revisions.c.number).where(t.revisions.c.name == name)
    newest = [*c.execute(numbers.order_by(t.revisions.c.number.desc()).limit(2)).scalars(), 0, 0]
    return Serving(name, name, newest[0], newest[1])


def locked_serving(c: sa.Connection, name: str) -> tuple[Serving, sa.Row[Any] | None, Rollout | None]:
    """Returns what serves an endpoint, the row of that application, and the endpoint's live rollout. The row is locked,
    so no rollout begins before the end of the transaction.

    The controller may promote the challenger meanwhile, and does not wait for the lock. What serves is therefore read
    again after the rollout: if no rollout is live, no promotion can follow.
    """
    now = serving(c, name)
    while True:
        found, which = now, core.endpoints.c.name == now.application
        row = c.execute(core.endpoints.select().where(which).with_for_update()).first()
        rollout = live(c, name)
        now = serving(c, name)
        if now.application == found.application:
            return now, row, rollout


def all_serving(c: sa.Connection) -> dict[str, Serving]:
    """Returns the application and the revision that serve each endpoint. The keys are the endpoints' names. Endpoints
    without a stored application and revision are left out.
    """
    return {row.name: Serving(row.name, row.application, row.revision, row.previous) for row in c.execute(_SERVING)}


_SERVING = t.serving.select()


def set_serving(c: sa.Connection, found: Serving, *, application: str, revision: int) -> None:
    """Stores which application and revision serve an endpoint from now on."""
    previous = found.revision if revision != found.revision else found.previous
    values = {"name": found.name, "application": application, "revision": revision, "previous": previous}
    upsert(c, t.serving, [values])


def live(c: sa.Connection, name: str) -> Rollout | None:
    r = t.rollouts.c
    row = c.execute(t.rollouts.select().where(r.name == name, r.state.in_(_LIVE))).first()
    return None if row is None else _rollout(row)


def _is_repeated(
    c: sa.Connection, found: Rollout, spec: ServeSpec, kind: RolloutKind, plan: Mapping[str, Any], user: str
) -> bool:
    """Returns whether a request asks for the rollout that was found: the answer to its first try may have been lost."""
    if (found.kind, found.plan, found.user) != (kind, plan, user):
        return False
    return any(revision.spec == spec for revision in revisions(c, spec.name, [found.challenger]))


def refuse_during_rollout(found: Rollout | None) -> None:
    if found is not None:
        raise ConflictError(
            f"endpoint {found.name} has a rollout of revision {found.challenger}.",
            hint=f"`raytide endpoint rollout {found.name}` shows it, and its --stop and --promote end it.",
        )


def unended(c: sa.Connection) -> tuple[Rollout, ...]:
    """Returns the rollouts that have not ended."""
    query = t.rollouts.select().where(_unended()).order_by(t.rollouts.c.number)
    return tuple(_rollout(row) for row in c.execute(query))


def commit_rollouts(c: sa.Connection, changed: Iterable[Rollout], at_s: float) -> None:
    """Writes the rollouts that the controller has changed.

    A promotion changes which application serves the endpoint. If a rollout's state or share of traffic changes, the
    audit log gets an entry.
    """
    r = t.rollouts.c
    for rollout in changed:
        before = c.execute(t.rollouts.select().where(r.number == rollout.number)).one()
        if rollout.state is RolloutState.PROMOTED and before.state != RolloutState.PROMOTED:
            found = serving(c, rollout.name)
            set_serving(c, found, application=rollout.challenger_application, revision=rollout.challenger)
        names = ("state", "percent", "reason", "progress", "decided_at_s", "ended_at_s")
        update(c, t.rollouts, {"number": rollout.number}, codec.values_of(rollout, names))
        if (before.state, before.percent) != (rollout.state, rollout.percent):
            detail = {"to": rollout.challenger, "percent": rollout.percent, "why": rollout.reason}
            add_entry(c, at_s, "raytide", f"rollout.{rollout.state}", rollout.name, detail)
        if rollout.ended_at_s is not None:
            c.execute(t.rollout_counts.delete().where(t.rollout_counts.c.rollout == rollout.number))


def _unended() -> sa.ColumnElement[bool]:
    return t.rollouts.c.ended_at_s.is_(None)


def _rollout(row: sa.Row[Any]) -> Rollout:
    return Rollout(**{**codec.fields_of(row, _FIELDS), "state": RolloutState(row.state)})
