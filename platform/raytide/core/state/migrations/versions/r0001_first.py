"""The first schema.

Migrations are frozen. Later migrations build on the tables that this migration made, even if the module `tables` has
changed since.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from raytide.core.state.migrations.columns import Row, columns

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "counters",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("next", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_counters"),
    )
    op.create_table(
        "endpoints",
        *columns(sa.String, "name", "team", "user"),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("delete_requested", sa.Boolean(), nullable=False),
        sa.Column("created_at_s", sa.Double(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("target_replicas", sa.Integer(), nullable=False),
        *columns(sa.Double, "low_since_s", "high_since_s", "ended_at_s", nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_endpoints"),
    )
    op.create_table(
        "entries",
        sa.Column("number", Row, nullable=False),
        sa.Column("node_id", sa.String(), nullable=False),
        *columns(sa.BigInteger, "from_us", "to_us"),
        *columns(sa.String, "kind", "subject", "team"),
        *columns(sa.BigInteger, "price_micro_usd_h", "amount_micro_usd"),
        sa.Column("is_reversal", sa.Boolean(), nullable=False),
        sa.CheckConstraint("to_us > from_us", name="ck_entries_forward"),
        sa.PrimaryKeyConstraint("number", name="pk_entries"),
        sa.UniqueConstraint(
            "node_id",
            "from_us",
            "kind",
            "subject",
            "is_reversal",
            name="uq_entries_node_id_from_us_kind_subject_is_reversal",
        ),
    )
    op.create_index("ix_entries_from_us", "entries", ["from_us"], unique=False)
    op.create_index("ix_entries_kind_subject", "entries", ["kind", "subject"], unique=False)
    op.create_table(
        "events",
        sa.Column("number", Row, nullable=False),
        sa.Column("at_s", sa.Double(), nullable=False),
        *columns(sa.String, "subject", "from_state", "to_state"),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_events"),
    )
    op.create_index("ix_events_subject_number", "events", ["subject", "number"], unique=False)
    op.create_table(
        "jobs",
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        *columns(sa.String, "id", "name", "kind", "team", "user"),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("client_key", sa.String()),
        sa.Column("submitted_at_s", sa.Double(), nullable=False),
        sa.Column("stop_requested", sa.Boolean(), nullable=False),
        sa.Column("heartbeat_at_s", sa.Double()),
        sa.Column("progress", sa.JSON(), nullable=False),
        sa.Column("released_by_driver", sa.Text()),
        sa.Column("state", sa.String(), nullable=False),
        *columns(sa.Double, "admitted_at_s", "started_at_s", "ended_at_s", nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("restarts", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_jobs"),
        sa.UniqueConstraint("id", name="uq_jobs_id"),
        sa.UniqueConstraint("user", "client_key", name="uq_jobs_user_client_key"),
    )
    op.create_index("ix_jobs_state", "jobs", ["state"], unique=False)
    op.create_index("ix_jobs_team_number", "jobs", ["team", "number"], unique=False)
    op.create_table(
        "nodes",
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        *columns(sa.String, "id", "type", "zone", "market"),
        sa.Column("price_micro_usd_h", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("requested_at_s", sa.Double(), nullable=False),
        *columns(sa.Double, "started_at_s", "ready_at_s", "drain_deadline_s", "ended_at_s", "lost_at_s", nullable=True),
        *columns(sa.String, "ray_node_id", "address", "subject"),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_nodes"),
        sa.UniqueConstraint("id", name="uq_nodes_id"),
    )
    op.create_index("ix_nodes_state", "nodes", ["state"], unique=False)
    op.create_table(
        "open_intervals",
        sa.Column("node_id", sa.String(), nullable=False),
        *columns(sa.BigInteger, "price_micro_usd_h", "origin_us", "from_us"),
        sa.Column("occupancy", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("node_id", name="pk_open_intervals"),
    )
    op.create_table(
        "plans",
        sa.Column("number", Row, nullable=False),
        *columns(sa.Double, "at_s", "last_at_s"),
        sa.Column("actions", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_plans"),
    )
    op.create_table(
        "pools",
        *columns(sa.String, "node_type", "zone"),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("retry_at_s", sa.Double(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("node_type", "zone", name="pk_pools"),
    )
    op.create_table(
        "leases",
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        *columns(sa.String, "id", "job_id"),
        sa.Column("shape", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        *columns(sa.Double, "form_timeout_s", "created_at_s"),
        sa.Column("forming_since_s", sa.Double()),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_leases_job_id"),
        sa.PrimaryKeyConstraint("number", name="pk_leases"),
        sa.UniqueConstraint("id", name="uq_leases_id"),
    )
    op.create_index("ix_leases_job_id", "leases", ["job_id"], unique=False)
    op.create_index("ix_leases_state", "leases", ["state"], unique=False)
    op.create_table(
        "members",
        sa.Column("lease_id", sa.String(), nullable=False),
        sa.Column("index", sa.Integer(), autoincrement=False, nullable=False),
        *columns(sa.String, "state", "node_id", "ray_node_id", "address", "placement_group_id"),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("leaves_at_s", sa.Double()),
        sa.ForeignKeyConstraint(["lease_id"], ["leases.id"], name="fk_members_lease_id"),
        sa.PrimaryKeyConstraint("lease_id", "index", name="pk_members"),
    )
