"""Serve's autoscaling policy for raytide's endpoints. It returns the replica count that raytide's controller published,
and publishes the load that Serve sees.

Serve pickles this module by value and runs it in Serve's controller. For that reason the module imports nothing of
raytide. It works while raytide's controller and API are down.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

KV_NAMESPACE = b"raytide-serve"
"""The namespace in the GCS's internal key-value store."""

EXCHANGE_PERIOD_S = 0.5
"""The least seconds between two exchanges with the GCS. Serve calls the policy about ten times a second; exchanging
that often would gain nothing.
"""


def target_key(endpoint: str) -> bytes:
    """Returns the key of an endpoint's replica count. The value is a decimal number."""
    return f"{endpoint}/target".encode()


def load_key(endpoint: str) -> bytes:
    """Returns the key under which the GCS stores an endpoint's load, as last reported by Serve. The value is JSON with
    the time of the report (`at_s`), the number of running replicas, and the last statistics of each replica. The
    statistics include the time of their measurement.
    """
    return f"{endpoint}/load".encode()


def published_target(ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Returns the published replica count and the policy's new state. Returns the current target if no count is
    published or the GCS has never answered.
    """
    state = dict(ctx.policy_state)
    now_s = float(ctx.current_time or 0.0)
    if not 0.0 < state.get("raytide_due_s", now_s) - now_s < 2 * EXCHANGE_PERIOD_S:  # also if the clock was set back
        state["raytide_due_s"] = now_s + EXCHANGE_PERIOD_S
        try:
            state["raytide_target"] = _exchange(ctx, now_s)
        except Exception:
            logging.getLogger("ray.serve").warning("raytide's scaling policy cannot reach the GCS", exc_info=True)
    published = state.get("raytide_target")
    return ctx.target_num_replicas if published is None else published, state


def _exchange(ctx: AutoscalingContext, now_s: float) -> int | None:
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

    endpoint = str(ctx.app_name)
    load = {
        "at_s": now_s,
        "running": ctx.current_num_replicas,
        "replicas": _replica_stats(ctx),
    }
    _internal_kv_put(load_key(endpoint), json.dumps(load).encode(), namespace=KV_NAMESPACE)
    published = _internal_kv_get(target_key(endpoint), namespace=KV_NAMESPACE)
    return int(published) if published else None


def _replica_stats(ctx: AutoscalingContext) -> dict[str, dict[str, float]]:
    """Returns each replica's last statistics and their time, `at_s`: Serve also keeps those of silent replicas."""
    stats: dict[str, dict[str, float]] = {}
    for name, by_replica in (ctx.raw_metrics or {}).items():
        for replica, series in by_replica.items():
            if series:
                latest = stats.setdefault(replica.unique_id, {"at_s": series[-1].timestamp})
                latest[name] = series[-1].value
                latest["at_s"] = min(latest["at_s"], series[-1].timestamp)
    for latest in stats.values():
        latest["at_s"] -= latest.pop("age_s", 0.0)
    return stats
