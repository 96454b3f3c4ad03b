"""Adds the values that users report for their signals. Endpoints scale on these signals."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.create_table(
        "endpoint_signals",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("signal", sa.String(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("at_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", "signal", name="pk_endpoint_signals"),
    )
