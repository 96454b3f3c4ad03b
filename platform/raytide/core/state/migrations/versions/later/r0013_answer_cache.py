"""Adds a column to API keys: whether the gateway may cache answers to a key's requests. Existing keys do not allow
this.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    with op.batch_alter_table("keys") as keys:
        keys.add_column(sa.Column("answer_cache", sa.Boolean(), nullable=False, server_default=sa.false()))
