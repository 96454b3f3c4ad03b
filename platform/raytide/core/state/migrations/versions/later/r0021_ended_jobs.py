"""Adds an index on the ends of jobs: the page shows the jobs that ended lately, and old jobs are deleted."""

from __future__ import annotations

from alembic import op

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    op.create_index("ix_jobs_ended_at_s", "jobs", ["ended_at_s"], unique=False)
