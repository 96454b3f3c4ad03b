"""API keys of the gateway, what they spent and used, and the audit log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_ROW = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "keys",
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        *_texts("id", "digest", "name", "team", "user", "account"),
        sa.Column("models", sa.JSON(), nullable=False),
        sa.Column("created_at_s", sa.Double(), nullable=False),
        sa.Column("expires_at_s", sa.Double()),
        sa.Column("revoked_at_s", sa.Double()),
        sa.Column("replaced_by", sa.String(), nullable=False),
        sa.Column("requests_per_min", sa.BigInteger()),
        sa.Column("tokens_per_min", sa.BigInteger()),
        sa.Column("budget_micro_usd", sa.BigInteger()),
        sa.Column("budget_per", sa.String(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("changed", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_keys"),
        sa.UniqueConstraint("id", name="uq_keys_id"),
        sa.UniqueConstraint("digest", name="uq_keys_digest"),
    )
    op.create_table(
        "spending",
        *_texts("account", "period"),
        *_whole("settled_micro_usd", "carried_pico_usd"),
        sa.PrimaryKeyConstraint("account", "period", name="pk_spending"),
    )
    op.create_table(
        "reservations",
        *_texts("id", "account", "period"),
        *_whole("amount_micro_usd"),
        *_texts("gateway"),
        sa.PrimaryKeyConstraint("id", name="pk_reservations"),
    )
    op.create_table(
        "gateways",
        *_texts("name"),
        sa.Column("seen_at_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_gateways"),
    )
    op.create_table(
        "usage",
        sa.Column("number", _ROW, nullable=False),
        *_texts("id"),
        sa.Column("at_s", sa.Double(), nullable=False),
        *_texts("key", "team", "user", "model", "version"),
        *_whole("prompt_tokens", "cached_tokens", "completion_tokens", "cost_micro_usd", "waived_micro_usd"),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_usage"),
        sa.UniqueConstraint("id", name="uq_usage_id"),
    )
    op.create_table(
        "audit",
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at_s", sa.Double(), nullable=False),
        *_texts("actor", "action", "object"),
        sa.Column("detail", sa.Text(), nullable=False),
        *_texts("previous", "hash"),
        sa.PrimaryKeyConstraint("seq", name="pk_audit"),
    )
    for table, columns in (
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
        op.create_index(f"ix_{table}_{'_'.join(columns)}", table, list(columns), unique=False)


def _texts(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.String(), nullable=False) for name in names]


def _whole(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.BigInteger(), nullable=False) for name in names]
