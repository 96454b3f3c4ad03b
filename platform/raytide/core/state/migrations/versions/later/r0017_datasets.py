"""Adds registered versions of datasets."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.create_table(
        "datasets",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("team", sa.String(), nullable=False),
        sa.Column("user", sa.String(), nullable=False),
        sa.Column("created_at_s", sa.Double(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("name", "version", name="pk_datasets"),
    )
    op.create_index("ix_datasets_team_name", "datasets", ["team", "name"])
    op.create_index("ix_datasets_name_digest", "datasets", ["name", "digest"])
