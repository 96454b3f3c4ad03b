"""Adds registered models, the history of their aliases, and revisions of endpoints."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from raytide.core.state.migrations.columns import columns

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "models",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        *columns(sa.String, "team", "user"),
        sa.Column("created_at_s", sa.Double(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("name", "version", name="pk_models"),
    )
    op.create_table(
        "alias_changes",
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        *columns(sa.String, "name", "alias"),
        *columns(sa.Integer, "before", "after", nullable=True),
        sa.Column("at_s", sa.Double(), nullable=False),
        *columns(sa.String, "user", "why"),
        sa.PrimaryKeyConstraint("number", name="pk_alias_changes"),
    )
    op.create_table(
        "endpoint_revisions",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        *columns(sa.String, "team", "user"),
        sa.Column("at_s", sa.Double(), nullable=False),
        sa.Column("why", sa.String(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("name", "number", name="pk_endpoint_revisions"),
    )
    for table, names in (
        ("models", ("team", "name")),
        ("models", ("name", "digest")),
        ("alias_changes", ("name", "alias", "number")),
    ):
        op.create_index(f"ix_{table}_{'_'.join(names)}", table, list(names), unique=False)
    # The present spec of each endpoint is its first revision.
    op.execute(
        'INSERT INTO endpoint_revisions (name, number, team, "user", at_s, why, spec) '
        "SELECT name, 1, team, \"user\", created_at_s, '', spec FROM endpoints WHERE state != 'deleted'"
    )
