"""Adds the API keys of the gateway, their spending and usage, and the audit log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from raytide.core.state.migrations.columns import Row, columns

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "keys",
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        *columns(sa.String, "id", "digest", "name", "team", "user", "account"),
        sa.Column("models", sa.JSON(), nullable=False),
        sa.Column("created_at_s", sa.Double(), nullable=False),
        *columns(sa.Double, "expires_at_s", "revoked_at_s", nullable=True),
        sa.Column("replaced_by", sa.String(), nullable=False),
        *columns(sa.BigInteger, "requests_per_min", "tokens_per_min", "budget_micro_usd", nullable=True),
        sa.Column("budget_per", sa.String(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("changed", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_keys"),
        sa.UniqueConstraint("id", name="uq_keys_id"),
        sa.UniqueConstraint("digest", name="uq_keys_digest"),
    )
    op.create_table(
        "spending",
        *columns(sa.String, "account", "period"),
        *columns(sa.BigInteger, "settled_micro_usd", "carried_pico_usd"),
        sa.PrimaryKeyConstraint("account", "period", name="pk_spending"),
    )
    op.create_table(
        "reservations",
        *columns(sa.String, "id", "account", "period"),
        sa.Column("amount_micro_usd", sa.BigInteger(), nullable=False),
        sa.Column("gateway", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_reservations"),
    )
    op.create_table(
        "gateways",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("seen_at_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_gateways"),
    )
    op.create_table(
        "usage",
        sa.Column("number", Row, nullable=False),
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("at_s", sa.Double(), nullable=False),
        *columns(sa.String, "key", "team", "user", "model", "version"),
        *columns(
            sa.BigInteger, "prompt_tokens", "cached_tokens", "completion_tokens", "cost_micro_usd", "waived_micro_usd"
        ),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_usage"),
        sa.UniqueConstraint("id", name="uq_usage_id"),
    )
    op.create_table(
        "audit",
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at_s", sa.Double(), nullable=False),
        *columns(sa.String, "actor", "action", "object"),
        sa.Column("detail", sa.Text(), nullable=False),
        *columns(sa.String, "previous", "hash"),
        sa.PrimaryKeyConstraint("seq", name="pk_audit"),
    )
    for table, names in (
        ("keys", ("team", "number")),
        ("keys", ("changed",)),
        ("reservations", ("account", "period")),
        ("reservations", ("gateway",)),
        ("usage", ("at_s",)),
        ("usage", ("team", "at_s")),
        ("usage", ("key", "at_s")),
        ("audit", ("at_s",)),
        ("audit", ("actor", "seq")),
        ("audit", ("action", "seq")),
    ):
        op.create_index(f"ix_{table}_{'_'.join(names)}", table, list(names), unique=False)
