"""Adds the queue's counters for each job, the teams' limits and recent usage, and the ledger's sums. Also adds a column
to the members of leases. The column says whether a member frees its resources for another job or endpoint.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from raytide.core.state.migrations.columns import columns

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    with op.batch_alter_table("jobs") as jobs:
        for name in ("attained_gpu_s", "held_s", "spell_gpus"):
            jobs.add_column(sa.Column(name, sa.Double(), nullable=False, server_default="0"))
        for name in ("spell_since_s", "preempted_at_s"):
            jobs.add_column(sa.Column(name, sa.Double(), nullable=True))
        jobs.add_column(sa.Column("preemptions", sa.Integer(), nullable=False, server_default="0"))
        jobs.add_column(sa.Column("reserved_micro_usd", sa.BigInteger(), nullable=False, server_default="0"))
    op.create_index("ix_jobs_held_s", "jobs", ["held_s"], unique=False)
    with op.batch_alter_table("members") as members:
        members.add_column(sa.Column("gives_way", sa.Boolean(), nullable=False, server_default="0"))
    op.create_table(
        "teams",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("spec", sa.JSON()),
        *columns(sa.Double, "recent_gpu_s", "recent_at_s"),
        sa.PrimaryKeyConstraint("name", name="pk_teams"),
    )
    op.create_table(
        "totals",
        *columns(sa.String, "kind", "subject", "team", "month"),
        sa.Column("amount_micro_usd", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "subject", "team", "month", name="pk_totals"),
    )
    op.create_index("ix_totals_month", "totals", ["month"], unique=False)
    _sum_what_is_booked()


def _sum_what_is_booked() -> None:
    """Fills the sums from the booked entries; each entry counts in the month (UTC) in which it began."""
    month = {
        "sqlite": "strftime('%Y-%m', from_us / 1000000, 'unixepoch')",
        "postgresql": "to_char(to_timestamp(from_us / 1000000) AT TIME ZONE 'UTC', 'YYYY-MM')",
    }[op.get_bind().dialect.name]
    op.execute(
        "INSERT INTO totals (kind, subject, team, month, amount_micro_usd) "  # month: one of two above  # nosec B608
        f"SELECT kind, subject, team, {month}, SUM(amount_micro_usd) FROM entries GROUP BY kind, subject, team, {month}"
    )
