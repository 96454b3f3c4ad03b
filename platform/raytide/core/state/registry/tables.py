"""The tables of registered models and of the revisions of endpoints. Only the API writes them."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Column, Double, Index, Integer, String, Table

from raytide.core.state.tables import metadata

models = Table(
    "models",
    metadata,
    Column("name", String, primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("team", String, nullable=False),
    Column("user", String, nullable=False),
    Column("created_at_s", Double, nullable=False),
    Column("digest", String, nullable=False),
    Column("spec", JSON, nullable=False),
    Index(None, "team", "name"),
    Index(None, "name", "digest"),
)
"""Versions of models, which are never changed. `digest` is a hash of `spec`."""

alias_changes = Table(
    "alias_changes",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("name", String, nullable=False),
    Column("alias", String, nullable=False),
    Column("before", Integer),
    Column("after", Integer),
    Column("at_s", Double, nullable=False),
    Column("user", String, nullable=False),
    Column("why", String, nullable=False),
    Index(None, "name", "alias", "number"),
)
"""The history of aliases. The newest change of an alias is its present value."""

revisions = Table(
    "endpoint_revisions",
    metadata,
    Column("name", String, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("team", String, nullable=False),
    Column("user", String, nullable=False),
    Column("at_s", Double, nullable=False),
    Column("why", String, nullable=False),
    Column("spec", JSON, nullable=False),
)
"""The specs that an endpoint had, oldest first."""
