"""The tables of registered models and datasets, of endpoints' revisions, and of rollouts.

Only the API writes these tables, except where a table's comment says otherwise. The controller deletes the counts of
rollouts that have ended, and old feedback.
"""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Column, Double, Index, Integer, String, Table

from raytide.core.state.migrations.columns import columns
from raytide.core.state.tables import SafeText, metadata


def _versions(name: str) -> Table:
    """Returns the table of versions of named things (see `versions.py`)."""
    return Table(
        name,
        metadata,
        Column("name", String, primary_key=True),
        Column("version", Integer, primary_key=True, autoincrement=False),
        *columns(String, "team", "user"),
        Column("created_at_s", Double, nullable=False),
        Column("digest", String, nullable=False),
        Column("spec", JSON, nullable=False),
        Index(None, "team", "name"),
        Index(None, "name", "digest"),
    )


models = _versions("models")
"""Versions of models, which are never changed. `digest` is a hash of `spec`."""

datasets = _versions("datasets")
"""Versions of datasets, which are never changed. `digest` is the SHA-256 of the manifest."""

alias_changes = Table(
    "alias_changes",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    *columns(String, "name", "alias"),
    *columns(Integer, "before", "after", nullable=True),
    Column("at_s", Double, nullable=False),
    *columns(String, "user", "why"),
    Index(None, "name", "alias", "number"),
)
"""The history of aliases. The newest change of an alias is its present value."""

revisions = Table(
    "endpoint_revisions",
    metadata,
    Column("name", String, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    *columns(String, "team", "user"),
    Column("at_s", Double, nullable=False),
    Column("why", String, nullable=False),
    Column("spec", JSON, nullable=False),
)
"""The specs that an endpoint had, oldest first."""

serving = Table(
    "serving",
    metadata,
    Column("name", String, primary_key=True),
    Column("application", String, nullable=False),
    *columns(Integer, "revision", "previous"),
)
"""The application and revision that serve an endpoint.

The controller changes a row when it promotes a revision. The API changes it when an endpoint gets a new spec, which it
refuses during a rollout.
"""

signals = Table(
    "endpoint_signals",
    metadata,
    Column("name", String, primary_key=True),
    Column("signal", String, primary_key=True),
    *columns(Double, "value", "at_s"),
)
"""The last value that was reported for each signal of an endpoint's `scale_on`."""

rollouts = Table(
    "rollouts",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    *columns(String, "name", "team", "user", "kind"),
    Column("plan", JSON, nullable=False),
    *columns(Integer, "champion", "challenger"),
    *columns(String, "champion_application", "challenger_application"),
    Column("created_at_s", Double, nullable=False),
    *columns(String, "why", "asked", "asked_by", "asked_why", "state"),
    Column("percent", Double, nullable=False),
    Column("reason", SafeText, nullable=False),
    Column("progress", JSON, nullable=False),
    *columns(Double, "decided_at_s", "ended_at_s", nullable=True),
    Index(None, "name", "number"),
    Index(None, "ended_at_s"),
)
"""The rollouts. The API writes the columns up to `asked_why`, and the controller those from `state` on."""

rollout_counts = Table(
    "rollout_counts",
    metadata,
    Column("rollout", BigInteger, primary_key=True, autoincrement=False),
    Column("revision", Integer, primary_key=True, autoincrement=False),
    Column("gateway", String, primary_key=True),
    *columns(BigInteger, "requests", "errors", "started", "late", "first_token_ms", "compared", "equal"),
)
"""The requests of each revision since the start of each gateway process."""

feedback = Table(
    "feedback",
    metadata,
    Column("id", String, primary_key=True),
    Column("at_s", Double, nullable=False),
    *columns(String, "team", "key", "model"),
    *columns(Integer, "revision", "unit_group"),
    Column("score", String, nullable=False),
    Column("comment", SafeText, nullable=False),
    Index(None, "model", "revision", "at_s"),
    Index(None, "at_s"),
)
"""Judgements of answers, one for each request of `usage`."""
feedback_values = Table(
    "feedback_values",
    metadata,
    Column("id", String, primary_key=True),
    Column("metric", String, primary_key=True),
    Column("at_s", Double, nullable=False),
    *columns(String, "team", "key", "model"),
    *columns(Integer, "revision", "unit_group"),
    Column("value", Double, nullable=False),
    Index(None, "model", "metric", "revision", "at_s"),
    Index(None, "at_s"),
)
"""Values of users' metrics, one for each request and metric."""
