"""The database tables, as the newest migration leaves them.

The API and the controller write different columns of a row, so they never conflict. The API inserts jobs, endpoints
and orders, and writes the columns marked `API`. The controller writes the other columns of these tables, and the
tables of leases, nodes, plans and the ledger. The API also writes the table `keys` and all tables below it in this
module, and the controller deletes the old rows of those tables. The API and the controller both append events and
audit entries.

Times are seconds since the epoch, but whole microseconds in the ledger. Money is in whole micro-dollars. The tables
hold no secrets. For API keys, they hold only hashes.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)

from raytide.core.bounds import storable
from raytide.core.state.migrations.columns import Row, columns

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)


class SafeText(TypeDecorator[str]):
    """A column for text from outside, such as an exception or the end of a log. It removes NULs and lone surrogates,
    which databases reject."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else storable(value)


counters = Table(
    "counters",
    metadata,
    Column("name", String, primary_key=True),
    Column("next", BigInteger, nullable=False),
)

leaders = Table(
    "leaders",
    metadata,
    Column("name", String, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("holder", String, nullable=False),
    Column("renewals", BigInteger, nullable=False),
)
"""The leader among controllers (see `leader`), the lease of the head, and the waiting heads (see `registry.heads`)."""

jobs = Table(
    "jobs",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("id", String, nullable=False, unique=True),
    *columns(String, "name", "kind", "team", "user"),
    Column("spec", JSON, nullable=False),
    *columns(String, "client_key", "client_digest", nullable=True),
    Column("submitted_at_s", Double, nullable=False),
    Column("stop_requested", Boolean, nullable=False),  # API
    Column("heartbeat_at_s", Double),  # API
    Column("progress", JSON, nullable=False),  # API
    Column("released_by_driver", SafeText),  # API
    Column("state", String, nullable=False),
    *columns(Double, "admitted_at_s", "started_at_s", "ended_at_s", "took_s", nullable=True),
    Column("reason", SafeText, nullable=False),
    Column("restarts", Integer, nullable=False),
    Column("attained_gpu_s", Double, nullable=False, default=0.0),
    Column("held_s", Double, nullable=False, default=0.0),
    Column("spell_since_s", Double),
    Column("spell_gpus", Double, nullable=False, default=0.0),
    Column("preemptions", Integer, nullable=False, default=0),
    Column("head_losses", Integer, nullable=False, default=0),
    Column("node_losses", Integer, nullable=False, default=0),
    Column("preempted_at_s", Double),
    Column("reserved_micro_usd", BigInteger, nullable=False, default=0),
    Column("struck_at_s", Double),
    Column("struck_by", String, nullable=False, default=""),
    Column("lost_s", Double, nullable=False, default=0.0),
    Column("changed", BigInteger, nullable=False, default=0),
    UniqueConstraint("team", "client_key"),
    Index(None, "state"),
    Index(None, "team", "number"),
    Index(None, "took_s"),
    Index(None, "ended_at_s"),
    Index(None, "changed"),
)

leases = Table(
    "leases",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("id", String, nullable=False, unique=True),
    Column("job_id", String, ForeignKey("jobs.id"), nullable=False),
    Column("shape", JSON, nullable=False),
    Column("state", String, nullable=False),
    Column("epoch", Integer, nullable=False),
    *columns(Double, "form_timeout_s", "created_at_s"),
    Column("forming_since_s", Double),
    Column("reason", SafeText, nullable=False),
    Column("changed", BigInteger, nullable=False, default=0),
    Index(None, "job_id"),
    Index(None, "state"),
    Index(None, "changed"),
)

members = Table(
    "members",
    metadata,
    Column("lease_id", String, ForeignKey("leases.id"), primary_key=True),
    Column("index", Integer, primary_key=True, autoincrement=False),
    *columns(String, "state", "node_id", "ray_node_id", "address", "placement_group_id"),
    Column("incarnation", Integer, nullable=False),
    Column("leaves_at_s", Double),
    Column("gives_way", Boolean, nullable=False, default=False),
    Column("given_to", String, nullable=False, default=""),
)

teams = Table(
    "teams",
    metadata,
    Column("name", String, primary_key=True),
    Column("spec", JSON(none_as_null=True)),  # API
    *columns(Double, "recent_gpu_s", "recent_at_s"),
)
"""The fields that override a team's configuration (`spec`), and its recent usage for fair share."""

nodes = Table(
    "nodes",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("id", String, nullable=False, unique=True),
    *columns(String, "type", "zone", "market"),
    Column("price_micro_usd_h", BigInteger, nullable=False),
    Column("state", String, nullable=False),
    Column("requested_at_s", Double, nullable=False),
    *columns(Double, "started_at_s", "ready_at_s", "drain_deadline_s", "ended_at_s", nullable=True),
    *columns(Double, "lost_at_s", nullable=True),
    *columns(String, "ray_node_id", "address", "subject"),
    Column("reason", SafeText, nullable=False),
    Column("quarantined", SafeText, nullable=False, default=""),
    Index(None, "state"),
)

endpoints = Table(
    "endpoints",
    metadata,
    Column("name", String, primary_key=True),
    *columns(String, "team", "user"),
    Column("spec", JSON, nullable=False),  # API
    Column("delete_requested", Boolean, nullable=False),  # API
    Column("created_at_s", Double, nullable=False),  # API
    Column("state", String, nullable=False),
    Column("target_replicas", Integer, nullable=False),
    *columns(Double, "low_since_s", "high_since_s", "ended_at_s", nullable=True),
    Column("reason", SafeText, nullable=False),
)

orders = Table(
    "orders",
    metadata,
    Column("number", Row, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("kind", String, nullable=False),  # API
    Column("subject", String, nullable=False),  # API
    Column("replica", String, nullable=False),  # API
    Column("reason", SafeText, nullable=False),  # API
    Column("user", String, nullable=False),  # API
    Column("at_s", Double, nullable=False),  # API
    Column("done_at_s", Double),
    Column("outcome", SafeText, nullable=False),
    Index(None, "done_at_s"),
)
"""Interventions by operators, or by alerts on their behalf, which the controller carries out once."""

pools = Table(
    "pools",
    metadata,
    Column("node_type", String, primary_key=True),
    Column("zone", String, primary_key=True),
    Column("failures", Integer, nullable=False),
    Column("retry_at_s", Double, nullable=False),
    Column("reason", SafeText, nullable=False),
)

open_intervals = Table(
    "open_intervals",
    metadata,
    Column("node_id", String, primary_key=True),
    *columns(BigInteger, "price_micro_usd_h", "origin_us", "from_us"),
    Column("occupancy", JSON, nullable=False),
)

entries = Table(
    "entries",
    metadata,
    Column("number", Row, primary_key=True),
    Column("node_id", String, nullable=False),
    *columns(BigInteger, "from_us", "to_us"),
    *columns(String, "kind", "subject", "team"),
    *columns(BigInteger, "price_micro_usd_h", "amount_micro_usd"),
    Column("is_reversal", Boolean, nullable=False),
    Column("cause", String, nullable=False, default=""),
    Column("energy_mj", BigInteger, nullable=False, default=0),
    CheckConstraint("to_us > from_us", name="forward"),
    UniqueConstraint("node_id", "from_us", "kind", "subject", "is_reversal", "cause"),
    Index(None, "kind", "subject"),
    Index(None, "from_us"),
)

totals = Table(
    "totals",
    metadata,
    Column("kind", String, primary_key=True),
    Column("subject", String, primary_key=True),
    Column("team", String, primary_key=True),
    Column("month", String, primary_key=True),
    Column("amount_micro_usd", BigInteger, nullable=False),
    Column("energy_mj", BigInteger, nullable=False, default=0),
    Index(None, "month"),
)
"""The sums of the ledger's entries by the month (`2026-11`, UTC) in which each began. They are written together with
the entries.
"""

plans = Table(
    "plans",
    metadata,
    Column("number", Row, primary_key=True),
    *columns(Double, "at_s", "last_at_s"),
    Column("actions", JSON, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("number", Row, primary_key=True),
    Column("at_s", Double, nullable=False),
    *columns(String, "subject", "from_state", "to_state"),
    Column("reason", SafeText, nullable=False),
    Index(None, "subject", "number"),
)

keys = Table(
    "keys",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("id", String, nullable=False, unique=True),
    Column("digest", String, nullable=False, unique=True),
    *columns(String, "name", "team", "user", "account"),
    Column("models", JSON, nullable=False),
    Column("created_at_s", Double, nullable=False),
    *columns(Double, "expires_at_s", "revoked_at_s", nullable=True),
    Column("replaced_by", String, nullable=False),
    *columns(BigInteger, "requests_per_min", "tokens_per_min", "budget_micro_usd", nullable=True),
    Column("budget_per", String, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("answer_cache", Boolean, nullable=False),
    Column("changed", BigInteger, nullable=False),
    Index(None, "team", "number"),
    Index(None, "changed"),
)
"""API keys of the gateway; `digest` is the SHA-256 of a random secret, `changed` the revision of the last change."""

spending = Table(
    "spending",
    metadata,
    Column("account", String, primary_key=True),
    Column("period", String, primary_key=True),
    *columns(BigInteger, "settled_micro_usd", "carried_pico_usd"),
)
"""The billed cost of an account in a month (`2026-11`, UTC) or in total (`life`). The row of the total also has the
fraction of a micro-dollar that is carried to the next request.
"""

reservations = Table(
    "reservations",
    metadata,
    Column("id", String, primary_key=True),
    *columns(String, "account", "period"),
    Column("amount_micro_usd", BigInteger, nullable=False),
    Column("gateway", String, nullable=False),
    Index(None, "account", "period"),
    Index(None, "gateway"),
)

gateways = Table(
    "gateways",
    metadata,
    Column("name", String, primary_key=True),
    Column("seen_at_s", Double, nullable=False),
)

usage = Table(
    "usage",
    metadata,
    Column("number", Row, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("at_s", Double, nullable=False),
    *columns(String, "key", "team", "user", "model", "version"),
    *columns(BigInteger, "prompt_tokens", "cached_tokens", "completion_tokens", "cost_micro_usd"),
    *columns(BigInteger, "waived_micro_usd"),
    Column("status", Integer, nullable=False),
    Index(None, "at_s"),
    Index(None, "team", "at_s"),
    Index(None, "key", "at_s"),
)

audit = Table(
    "audit",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("at_s", Double, nullable=False),
    *columns(String, "actor", "action", "object"),
    Column("detail", Text, nullable=False),
    *columns(String, "previous", "hash"),
    Index(None, "at_s"),
    Index(None, "actor", "seq"),
    Index(None, "action", "seq"),
)
"""The hash-chained log of changes and of the gateways' requests. `detail` is JSON as it was hashed."""
