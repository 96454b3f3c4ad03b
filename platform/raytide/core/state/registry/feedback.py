"""Judgements of answers in the store, by the revision that answered."""

from __future__ import annotations

import sqlalchemy as sa

from raytide.core.errors import NotFoundError
from raytide.core.objects.endpoint import ADAPTER_SEPARATOR
from raytide.core.specs.rollout import Feedback, RevisionFeedback, group_in_id, served_revision
from raytide.core.state import tables as core
from raytide.core.state.database import Database
from raytide.core.state.registry import tables as t
from raytide.core.state.write import upsert


class FeedbackRecords:
    def __init__(self, database: Database) -> None:
        self._db = database

    def save(self, given: Feedback, now_s: float) -> int:
        """Keeps the judgement of a request, in place of an earlier one; returns the revision that answered it.

        Raises NotFoundError for a request that is not in the usage of this team.
        """
        request_id = given.request_id.replace("_", "-").rpartition("-")[2]
        u = core.usage.c
        with self._db.write() as c:
            row = c.execute(sa.select(u.team, u.model, u.version).where(u.id == request_id)).first()
            endpoint = "" if row is None else row.model.partition(ADAPTER_SEPARATOR)[0]
            if row is None or row.team != given.team or given.model not in ("", endpoint):
                raise NotFoundError(f"request {given.request_id} is not known.", hint="Send the id of an answer.")
            revision = served_revision(row.version)
            group = group_in_id(request_id)
            values = {"id": request_id, "unit_group": group, "at_s": now_s, "model": endpoint, "revision": revision}
            kept = {name: getattr(given, name) for name in ("team", "key", "score", "comment")}
            upsert(c, t.feedback, [{**values, **kept}])
            return revision

    def sums(self, name: str) -> tuple[RevisionFeedback, ...]:
        """Returns the thumbs of each revision of an endpoint, newest revision first."""
        f = t.feedback.c
        query = sa.select(f.revision, *thumbs()).where(f.model == name).group_by(f.revision)
        with self._db.read() as c:
            rows = c.execute(query.order_by(f.revision.desc())).all()
        return tuple(RevisionFeedback(row.revision, int(row.judged - row.disliked), int(row.disliked)) for row in rows)

    def totals(self) -> list[tuple[str, int, int, int]]:
        """Returns (endpoint, revision, thumbs up, thumbs down) of all endpoints."""
        f = t.feedback.c
        query = sa.select(f.model, f.revision, *thumbs()).group_by(f.model, f.revision).order_by(f.model, f.revision)
        with self._db.read() as c:
            rows = c.execute(query).all()
        return [(row.model, row.revision, int(row.judged - row.disliked), int(row.disliked)) for row in rows]

    def groups(self, name: str, since_s: float) -> dict[int, dict[int, tuple[int, int]]]:
        """Returns the judged and the liked answers since a time, by revision and by group of users."""
        f = t.feedback.c
        query = sa.select(f.revision, f.unit_group, *thumbs()).where(f.model == name, f.at_s >= since_s)
        found: dict[int, dict[int, tuple[int, int]]] = {}
        with self._db.read() as c:
            for row in c.execute(query.where(f.unit_group >= 0).group_by(f.revision, f.unit_group)):
                judged = int(row.judged)
                found.setdefault(row.revision, {})[row.unit_group] = (judged, judged - int(row.disliked))
        return found

    def prune(self, before_s: float) -> None:
        """Deletes judgements from before this time."""
        with self._db.write() as c:
            c.execute(t.feedback.delete().where(t.feedback.c.at_s < before_s))


def thumbs() -> tuple[sa.ColumnElement[int], sa.ColumnElement[int]]:
    """Returns the columns `judged` and `disliked`."""
    down = sa.case((t.feedback.c.score == "down", 1), else_=0)
    return sa.func.count().label("judged"), sa.func.coalesce(sa.func.sum(down), 0).label("disliked")
