"""Adds the age of each finished job: the time from its submission to its end. The queue uses this age in place of the
time for which the job held its GPUs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.drop_index("ix_jobs_held_s", table_name="jobs")
    op.add_column("jobs", sa.Column("took_s", sa.Double(), nullable=True))
    op.execute("UPDATE jobs SET took_s = ended_at_s - submitted_at_s WHERE ended_at_s IS NOT NULL")
    op.create_index("ix_jobs_took_s", "jobs", ["took_s"], unique=False)
