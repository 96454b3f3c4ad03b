"""Adds a column to jobs: the number of times that the job was restarted because the driver had lost all nodes of the
gang.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    with op.batch_alter_table("jobs") as jobs:
        jobs.add_column(sa.Column("node_losses", sa.Integer(), nullable=False, server_default="0"))
