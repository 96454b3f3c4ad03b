"""Adds energy to the entries of the ledger and to the sums of entries."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    for name in ("entries", "totals"):
        with op.batch_alter_table(name) as table:
            table.add_column(sa.Column("energy_mj", sa.BigInteger(), nullable=False, server_default="0"))
