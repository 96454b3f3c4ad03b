"""Adds rollouts of endpoints, the request counts of their revisions, and the application that serves each endpoint."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from raytide.core.state.migrations.columns import columns

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_table(
        "serving",
        *columns(sa.String, "name", "application"),
        *columns(sa.Integer, "revision", "previous"),
        sa.PrimaryKeyConstraint("name", name="pk_serving"),
    )
    op.execute(
        "INSERT INTO serving (name, application, revision, previous) "
        "SELECT name, name, MAX(number), MAX(number) - 1 FROM endpoint_revisions GROUP BY name"
    )
    op.create_table(
        "rollouts",
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        *columns(sa.String, "name", "team", "user", "kind"),
        sa.Column("plan", sa.JSON(), nullable=False),
        *columns(sa.Integer, "champion", "challenger"),
        *columns(sa.String, "champion_application", "challenger_application"),
        sa.Column("created_at_s", sa.Double(), nullable=False),
        *columns(sa.String, "why", "asked", "asked_by", "asked_why", "state"),
        sa.Column("percent", sa.Double(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("progress", sa.JSON(), nullable=False),
        *columns(sa.Double, "decided_at_s", "ended_at_s", nullable=True),
        sa.PrimaryKeyConstraint("number", name="pk_rollouts"),
    )
    op.create_table(
        "rollout_counts",
        sa.Column("rollout", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("revision", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("gateway", sa.String(), nullable=False),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in ("requests", "errors", "started", "late", "first_token_ms")
        ),
        sa.PrimaryKeyConstraint("rollout", "revision", "gateway", name="pk_rollout_counts"),
    )
    op.create_index("ix_rollouts_name_number", "rollouts", ["name", "number"], unique=False)
    op.create_index("ix_rollouts_ended_at_s", "rollouts", ["ended_at_s"], unique=False)
