"""Adds the scores and comments that users give to answers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from raytide.core.state.migrations.columns import columns

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "feedback",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("at_s", sa.Double(), nullable=False),
        *columns(sa.String, "team", "key", "model"),
        *columns(sa.Integer, "revision", "unit_group"),
        sa.Column("score", sa.String(), nullable=False),
        sa.Column("comment", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_feedback"),
    )
    op.create_index("ix_feedback_model_revision_at_s", "feedback", ["model", "revision", "at_s"], unique=False)
    op.create_index("ix_feedback_at_s", "feedback", ["at_s"], unique=False)
