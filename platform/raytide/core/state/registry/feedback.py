"""Stores users' judgements of answers. Each judgement is stored under the endpoint revision that gave the answer."""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa

from raytide.core.errors import NotFoundError, UsageError
from raytide.core.objects.endpoint import ADAPTER_SEPARATOR
from raytide.core.specs.rollout import (
    MOST_METRICS,
    Feedback,
    MetricLimit,
    RevisionFeedback,
    group_in_id,
    served_revision,
)
from raytide.core.state import tables as core
from raytide.core.state.database import DatabaseAccess
from raytide.core.state.registry import tables as t
from raytide.core.state.write import upsert


class FeedbackRecords(DatabaseAccess):
    def save(self, given: Feedback, now_s: float) -> int:
        """Stores the judgement of a request's answer, in place of an earlier judgement. Returns the revision that gave
        the answer.

        Raises NotFoundError if the request is not in the usage of this team. Raises UsageError if the request already
        has the largest allowed number of metrics.
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
            if given.metric is not None:
                self._save_value(c, {**values, "team": given.team, "key": given.key}, given.metric, given.value)
            else:
                kept = {name: getattr(given, name) for name in ("team", "key", "score", "comment")}
                upsert(c, t.feedback, [{**values, **kept}])
            return revision

    def _save_value(self, c: sa.Connection, row: dict[str, object], metric: str, value: float | None) -> None:
        v = t.feedback_values.c
        others = sa.select(sa.func.count()).where(v.id == row["id"], v.metric != metric)
        if c.execute(others).scalar_one() >= MOST_METRICS:
            raise UsageError(f"an answer has at most {MOST_METRICS} metrics.", hint="Send others with other answers.")
        upsert(c, t.feedback_values, [{**row, "metric": metric, "value": value}])

    def sums(self, name: str) -> tuple[RevisionFeedback, ...]:
        """Returns the judgements of each revision of an endpoint, newest revision first."""
        f, v = t.feedback.c, t.feedback_values.c
        query = sa.select(f.revision, *thumbs()).where(f.model == name).group_by(f.revision)
        means = sa.select(v.revision, v.metric, sa.func.count().label("number"), sa.func.avg(v.value).label("mean"))
        metrics: dict[int, dict[str, tuple[int, float]]] = {}
        with self._db.read() as c:
            found = {row.revision: (int(row.judged), int(row.disliked)) for row in c.execute(query)}
            for row in c.execute(means.where(v.model == name).group_by(v.revision, v.metric).order_by(v.metric)):
                metrics.setdefault(row.revision, {})[row.metric] = (int(row.number), float(row.mean))
        revisions = sorted(found.keys() | metrics.keys(), reverse=True)
        thumbed = {each: found.get(each, (0, 0)) for each in revisions}
        return tuple(
            RevisionFeedback(each, judged - disliked, disliked, metrics.get(each, {}))
            for each, (judged, disliked) in thumbed.items()
        )

    def totals(self) -> list[tuple[str, int, int, int]]:
        """Returns a row (endpoint, revision, thumbs up, thumbs down) for each revision of all endpoints."""
        f = t.feedback.c
        query = sa.select(f.model, f.revision, *thumbs()).group_by(f.model, f.revision).order_by(f.model, f.revision)
        rows = self._db.rows(query)
        return [(row.model, row.revision, int(row.judged - row.disliked), int(row.disliked)) for row in rows]

    def groups(self, name: str, since_s: float, metric: str | None = None) -> dict[int, dict[int, tuple[int, float]]]:
        """Counts the judgements since `since_s`. Returns, for each revision and group of users, a pair (judged, liked):
        the number of judged answers, and the number of likes among the judgements.

        With a metric, returns other pairs: the number of the metric's values since `since_s`, and the sum of these
        values.
        """
        f = t.feedback.c if metric is None else t.feedback_values.c
        liked = sa.case((f.score == "up", 1), else_=0) if metric is None else f.value
        which = [f.model == name, f.at_s >= since_s, *([] if metric is None else [f.metric == metric])]
        query = sa.select(f.revision, f.unit_group, sa.func.count().label("number"), sa.func.sum(liked).label("total"))
        query = query.where(*which, f.unit_group >= 0).group_by(f.revision, f.unit_group)
        found: dict[int, dict[int, tuple[int, float]]] = {}
        with self._db.read() as c:
            for row in c.execute(query):
                found.setdefault(row.revision, {})[row.unit_group] = (int(row.number), float(row.total))
        return found

    def bad_values(
        self, name: str, limits: Mapping[str, MetricLimit], since_s: float
    ) -> dict[int, dict[str, tuple[int, int]]]:
        """Returns (number, bad) for each revision and metric: the number of all values since `since_s`, and the number
        of bad values among them. `limits` says which values of a metric are bad."""
        v = t.feedback_values.c
        found: dict[int, dict[str, tuple[int, int]]] = {}
        with self._db.read() as c:
            for metric, limit in limits.items():
                bounds = [] if limit.below is None else [v.value < limit.below]
                bounds += [] if limit.above is None else [v.value > limit.above]
                bad = sa.func.sum(sa.case((sa.or_(*bounds), 1), else_=0)).label("bad")
                query = sa.select(v.revision, sa.func.count().label("number"), bad)
                query = query.where(v.model == name, v.metric == metric, v.at_s >= since_s).group_by(v.revision)
                for row in c.execute(query):
                    found.setdefault(row.revision, {})[metric] = (int(row.number), int(row.bad))
        return found

    def prune(self, before_s: float) -> None:
        """Deletes the judgements that were made before `before_s`."""
        with self._db.write() as c:
            c.execute(t.feedback.delete().where(t.feedback.c.at_s < before_s))
            c.execute(t.feedback_values.delete().where(t.feedback_values.c.at_s < before_s))


def thumbs() -> tuple[sa.ColumnElement[int], sa.ColumnElement[int]]:
    """Returns two SQL columns: `judged` is the number of judgements, and `disliked` the number of thumbs down."""
    down = sa.case((t.feedback.c.score == "down", 1), else_=0)
    return sa.func.count().label("judged"), sa.func.coalesce(sa.func.sum(down), 0).label("disliked")
