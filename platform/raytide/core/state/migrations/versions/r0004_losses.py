"""Adds the interruptions of jobs, the work that jobs lost, and the ledger entries that move lost work to waste."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    with op.batch_alter_table("jobs") as jobs:
        jobs.add_column(sa.Column("struck_at_s", sa.Double(), nullable=True))
        jobs.add_column(sa.Column("struck_by", sa.String(), nullable=False, server_default=""))
        jobs.add_column(sa.Column("lost_s", sa.Double(), nullable=False, server_default="0"))
    # SQLite copies the table, and of its checks only those that are named here.
    is_forward = sa.CheckConstraint("to_us > from_us", name=op.f("ck_entries_forward"))
    with op.batch_alter_table("entries", table_args=(is_forward,)) as entries:
        entries.add_column(sa.Column("cause", sa.String(), nullable=False, server_default=""))
        entries.drop_constraint("uq_entries_node_id_from_us_kind_subject_is_reversal", type_="unique")
        entries.create_unique_constraint(
            "uq_entries_node_id_from_us_kind_subject_is_reversal_cause",
            ["node_id", "from_us", "kind", "subject", "is_reversal", "cause"],
        )
