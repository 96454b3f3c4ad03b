"""Adds the table `feedback_values`. It stores the values that users report for answers, in metrics that the users
define.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from raytide.core.state.migrations.columns import columns

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.create_table(
        "feedback_values",
        *columns(sa.String, "id", "metric"),
        sa.Column("at_s", sa.Double(), nullable=False),
        *columns(sa.String, "team", "key", "model"),
        *columns(sa.Integer, "revision", "unit_group"),
        sa.Column("value", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", "metric", name="pk_feedback_values"),
    )
    op.create_index(
        "ix_feedback_values_model_metric_revision_at_s", "feedback_values", ["model", "metric", "revision", "at_s"]
    )
    op.create_index("ix_feedback_values_at_s", "feedback_values", ["at_s"])
