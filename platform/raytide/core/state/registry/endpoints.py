"""Writes endpoints. Each new spec of an endpoint is a revision. The spec is given to the application that serves the
endpoint.

This module also stores the values that users report for signals. The API writes them and the controller reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from raytide.core.errors import ConflictError
from raytide.core.objects.endpoint import Endpoint, EndpointState, ServeSpec
from raytide.core.objects.node import Signal
from raytide.core.specs.rollout import REVISION_SEPARATOR, Serving, endpoint_of
from raytide.core.state import codec
from raytide.core.state import tables as t
from raytide.core.state.caps import check_live_endpoints
from raytide.core.state.database import Database
from raytide.core.state.queries.jobs import no_endpoint
from raytide.core.state.records import Event
from raytide.core.state.registry.revisions import add_revision
from raytide.core.state.registry.rollouts import locked_serving, refuse_during_rollout, serving, set_serving
from raytide.core.state.registry.tables import serving as applications
from raytide.core.state.registry.tables import signals
from raytide.core.state.tenancy.audit import record
from raytide.core.state.tenancy.keys import touch_key_table
from raytide.core.state.write import note, update, upsert

_KEPT_S = 86_400.0


def save_endpoint(c: sa.Connection, spec: ServeSpec, user: str, now_s: float, why: str, seen: int = 0) -> Endpoint:
    """Creates an endpoint, or gives an existing endpoint a new spec as a new revision. Returns the endpoint. `seen` is
    the revision that the spec was derived from; 0 if there is none.

    Raises ConflictError if an endpoint of that name has a rollout, is being deleted or belongs to another team, or if
    another revision than `seen` serves it now.
    """
    found, row, rollout = locked_serving(c, spec.name)
    if seen not in (0, found.revision):
        raise ConflictError(f"endpoint {spec.name} was changed meanwhile.", hint="Try again: nothing was written.")
    if found.application != spec.name and (row is None or row.state == EndpointState.DELETED):
        found = Serving(spec.name, spec.name, found.revision)  # it begins anew
        row = c.execute(_endpoint(spec.name).with_for_update()).first()
    stored = spec.model_copy(update={"name": found.application})
    if row is None or row.team == spec.team or row.state == EndpointState.DELETED:
        check_live_endpoints(c, stored)
    if row is None:
        c.execute(t.endpoints.insert(), codec.new_endpoint(stored, user, now_s))
    elif row.state == EndpointState.DELETED:
        update(c, t.endpoints, {"name": stored.name}, codec.new_endpoint(stored, user, now_s))
    elif row.delete_requested or row.state == EndpointState.DELETING:
        raise ConflictError(f"endpoint {spec.name} is being deleted.", hint="Try again when it is deleted.")
    elif row.team != spec.team:
        raise ConflictError(f"endpoint {spec.name} belongs to team {row.team}.", hint="Choose another name.")
    else:
        refuse_during_rollout(rollout)
        values: dict[str, Any] = {"spec": stored.model_dump(mode="json")}
        if codec.endpoint(row).is_given_up:  # Serve never retries a failed one: create it anew
            values |= {"created_at_s": now_s, "reason": ""}
        if row.state == EndpointState.FAILED:
            values["state"] = EndpointState.DEPLOYING
        update(c, t.endpoints, {"name": stored.name}, values)
    if row is None or row.state in (EndpointState.DELETED, EndpointState.FAILED):
        before = row.state if row is not None and row.state == EndpointState.FAILED else ""
        note(c, [Event(now_s, stored.name, before, "deploying", f"requested by {user}")])
    touch_key_table(c)
    number = add_revision(c, spec, user, now_s, why)
    set_serving(c, found, application=found.application, revision=number)
    record(c, "endpoint.save", spec.name, {**codec.audited(spec), "revision": number, "why": why})
    return served_endpoint(c, spec.name)


def request_delete(c: sa.Connection, name: str) -> Endpoint:
    """Requests the deletion of an endpoint and of its challenger. Has no effect on a deleted endpoint. Raises
    ConflictError if `name` is the application of a promoted challenger, because that application is now the one that
    serves the endpoint.
    """
    if name != (endpoint := endpoint_of(name)) and serving(c, endpoint).application == name:
        raise ConflictError(f"{name} serves endpoint {endpoint} now.", hint=f"Delete {endpoint}, if that is meant.")
    found, row, rollout = locked_serving(c, name)
    if row is None:
        raise no_endpoint(name)
    if not row.delete_requested:
        for each in (found.application, *([] if rollout is None else [rollout.challenger_application])):
            update(c, t.endpoints, {"name": each}, {"delete_requested": True})
        touch_key_table(c)
        record(c, "endpoint.delete", name)
    return served_endpoint(c, name)


def served_endpoint(c: sa.Connection, name: str) -> Endpoint:
    """Returns the record of the application that serves this endpoint now."""
    row = c.execute(_endpoint(serving(c, name).application)).first()
    if row is None:
        raise no_endpoint(name)
    return codec.endpoint(row)


def endpoints(c: sa.Connection, *, ended: bool) -> tuple[Endpoint, ...]:
    """Returns the records of all applications, sorted by name. Deleted applications are included only if `ended` is
    true. Deleted challengers that serve no endpoint are never included, because each rollout may leave such a record.
    """
    e = t.endpoints.c
    query = t.endpoints.select().order_by(e.name)
    if ended:
        serves = sa.or_(~e.name.contains(REVISION_SEPARATOR), e.name.in_(sa.select(applications.c.application)))
        query = query.where(sa.or_(e.state != EndpointState.DELETED, serves))
    else:
        query = query.where(e.state != EndpointState.DELETED)
    return tuple(codec.endpoint(row) for row in c.execute(query))


def _endpoint(name: str) -> sa.Select[Any]:
    return t.endpoints.select().where(t.endpoints.c.name == name)


class SignalRecords:
    """The last value of each signal that users report."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def save(self, endpoint: str, values: Mapping[str, float], now_s: float) -> None:
        """Stores the reported values of an endpoint's signals, in place of earlier values. Also deletes values that are
        older than a day, for all endpoints.
        """
        rows = [{"name": endpoint, "signal": name, "value": value, "at_s": now_s} for name, value in values.items()]
        with self._db.write() as c:
            c.execute(signals.delete().where(signals.c.at_s < now_s - _KEPT_S))
            upsert(c, signals, rows)


def reported(c: sa.Connection) -> dict[tuple[str, str], Signal]:
    """Returns the last reported values, by (endpoint, signal)."""
    return {(row.name, row.signal): Signal(row.value, row.at_s) for row in c.execute(signals.select())}
