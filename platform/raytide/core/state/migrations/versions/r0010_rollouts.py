"""Rollouts of endpoints, the counts of their revisions, and which application serves an endpoint."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_table(
        "serving",
        *_texts("name", "application"),
        *_numbers("revision", "previous"),
        sa.PrimaryKeyConstraint("name", name="pk_serving"),
    )
    op.execute(
        "INSERT INTO serving (name, application, revision, previous) "
        "SELECT name, name, MAX(number), MAX(number) - 1 FROM endpoint_revisions GROUP BY name"
    )
    op.create_table(
        "rollouts",
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        *_texts("name", "team", "user", "kind"),
        sa.Column("plan", sa.JSON(), nullable=False),
        *_numbers("champion", "challenger"),
        *_texts("champion_application", "challenger_application"),
        sa.Column("created_at_s", sa.Double(), nullable=False),
        *_texts("why", "asked", "asked_by", "asked_why", "state"),
        sa.Column("percent", sa.Double(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("progress", sa.JSON(), nullable=False),
        sa.Column("decided_at_s", sa.Double()),
        sa.Column("ended_at_s", sa.Double()),
        sa.PrimaryKeyConstraint("number", name="pk_rollouts"),
    )
    op.create_table(
        "rollout_counts",
        sa.Column("rollout", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("revision", sa.Integer(), autoincrement=False, nullable=False),
        *_texts("gateway"),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in ("requests", "errors", "started", "late", "first_token_ms")
        ),
        sa.PrimaryKeyConstraint("rollout", "revision", "gateway", name="pk_rollout_counts"),
    )
    op.create_index("ix_rollouts_name_number", "rollouts", ["name", "number"], unique=False)
    op.create_index("ix_rollouts_ended_at_s", "rollouts", ["ended_at_s"], unique=False)


def _texts(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.String(), nullable=False) for name in names]


def _numbers(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.Integer(), nullable=False) for name in names]
