"""Adds a column to the members of leases: the job or endpoint for which a member freed its resources."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    with op.batch_alter_table("members") as members:
        members.add_column(sa.Column("given_to", sa.String(), nullable=False, server_default=""))
