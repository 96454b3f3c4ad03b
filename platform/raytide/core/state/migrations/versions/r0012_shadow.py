"""Adds two counts about shadow requests: the number of compared answers, and the number of equal answers among them. A
shadow request is a copy of a user's request.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.execute("DELETE FROM rollout_counts")  # gateways report totals again
    with op.batch_alter_table("rollout_counts") as table:
        for name in ("compared", "equal"):
            table.add_column(sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
