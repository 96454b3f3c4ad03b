"""Adds a column to jobs: the number of times that the job was restarted because its driver was lost together with the
head.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    with op.batch_alter_table("jobs") as jobs:
        jobs.add_column(sa.Column("head_losses", sa.Integer(), nullable=False, server_default="0"))
