"""Makes idempotency keys unique within a team instead of within a user. Adds to each job a digest of the request that
created the job with its idempotency key. Adds to each job and lease the number of the commit that last changed it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    # Two users of one team may have used the same key: the newest job keeps it.
    op.execute(
        "UPDATE jobs SET client_key = NULL WHERE client_key IS NOT NULL AND number NOT IN "
        "(SELECT MAX(number) FROM jobs WHERE client_key IS NOT NULL GROUP BY team, client_key)"
    )
    with op.batch_alter_table("jobs") as jobs:
        jobs.add_column(sa.Column("client_digest", sa.String(), nullable=True))
        jobs.add_column(sa.Column("changed", sa.BigInteger(), nullable=False, server_default="0"))
        jobs.drop_constraint("uq_jobs_user_client_key", type_="unique")
        jobs.create_unique_constraint("uq_jobs_team_client_key", ["team", "client_key"])
    op.create_index("ix_jobs_changed", "jobs", ["changed"], unique=False)
    with op.batch_alter_table("leases") as leases:
        leases.add_column(sa.Column("changed", sa.BigInteger(), nullable=False, server_default="0"))
    op.create_index("ix_leases_changed", "leases", ["changed"], unique=False)
