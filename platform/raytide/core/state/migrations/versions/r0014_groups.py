"""The groups of users in A/B tests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    with op.batch_alter_table("feedback") as table:
        table.add_column(sa.Column("unit_group", sa.Integer(), nullable=False, server_default="-1"))
