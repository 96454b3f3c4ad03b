"""Values of users' own metrics for answers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.create_table(
        "feedback_values",
        *_texts("id", "metric"),
        sa.Column("at_s", sa.Double(), nullable=False),
        *_texts("team", "key", "model"),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("unit_group", sa.Integer(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", "metric", name="pk_feedback_values"),
    )
    op.create_index(
        "ix_feedback_values_model_metric_revision_at_s", "feedback_values", ["model", "metric", "revision", "at_s"]
    )
    op.create_index("ix_feedback_values_at_s", "feedback_values", ["at_s"])


def _texts(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.String(), nullable=False) for name in names]
