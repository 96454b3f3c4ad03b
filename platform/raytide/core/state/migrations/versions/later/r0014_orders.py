"""Adds interventions of operators, and the quarantine of nodes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from raytide.core.state.migrations.columns import Row, columns

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.create_table(
        "orders",
        sa.Column("number", Row, nullable=False),
        *columns(sa.String, "id", "kind", "subject", "replica"),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("user", sa.String(), nullable=False),
        sa.Column("at_s", sa.Double(), nullable=False),
        sa.Column("done_at_s", sa.Double()),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_orders"),
        sa.UniqueConstraint("id", name="uq_orders_id"),
    )
    op.create_index("ix_orders_done_at_s", "orders", ["done_at_s"])
    with op.batch_alter_table("nodes") as nodes:
        nodes.add_column(sa.Column("quarantined", sa.Text(), nullable=False, server_default=""))
