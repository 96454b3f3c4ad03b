"""Judgements of answers by their users."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "feedback",
        *_texts("id"),
        sa.Column("at_s", sa.Double(), nullable=False),
        *_texts("team", "key", "model"),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("unit_group", sa.Integer(), nullable=False),
        *_texts("score"),
        sa.Column("comment", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_feedback"),
    )
    op.create_index("ix_feedback_model_revision_at_s", "feedback", ["model", "revision", "at_s"], unique=False)
    op.create_index("ix_feedback_at_s", "feedback", ["at_s"], unique=False)


def _texts(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.String(), nullable=False) for name in names]
