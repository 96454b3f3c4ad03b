"""Adds to each job how often it was restarted because its driver had lost all its nodes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    with op.batch_alter_table("jobs") as jobs:
        jobs.add_column(sa.Column("node_losses", sa.Integer(), nullable=False, server_default="0"))
