"""Money as integer micro-dollars. Prices are in micro-dollars an hour, and times in integer microseconds.

The cost of an interval is the difference of two rounded cumulative costs. The costs of the interval's parts thus sum to
its cost exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import ROUND_HALF_EVEN, Decimal

MICRO = 1_000_000
_HOUR_US = 3600 * MICRO


def micro_usd(usd: float | str | Decimal) -> int:
    """Converts dollars to micro-dollars: `micro_usd("3.06") == 3_060_000`."""
    return int((Decimal(str(usd)) * MICRO).to_integral_value(ROUND_HALF_EVEN))


def to_us(seconds: float) -> int:
    """Converts seconds to whole microseconds, the resolution of billing."""
    return round(seconds * MICRO)


def month_of(us: int) -> str:
    """Returns the month in UTC, such as `2026-11`, in which the time `us` lies. The budget of this month pays for an
    interval that began at `us`."""
    return datetime.fromtimestamp(us // MICRO, UTC).strftime("%Y-%m")


def cumulative(price_micro_usd_h: int, since_us: int, until_us: int) -> int:
    """Returns the cost of the time from `since_us` to `until_us`, rounded half up to a micro-dollar."""
    if until_us < since_us:
        raise ValueError(f"an interval cannot end ({until_us}) before it starts ({since_us})")
    return (price_micro_usd_h * (until_us - since_us) + _HOUR_US // 2) // _HOUR_US


def interval_cost(price_micro_usd_h: int, origin_us: int, from_us: int, to_us: int) -> int:
    """Returns the cost of the interval [from, to) of a node whose billing began at `origin`. The costs of adjacent
    intervals sum exactly to the cost of both together."""
    return cumulative(price_micro_usd_h, origin_us, to_us) - cumulative(price_micro_usd_h, origin_us, from_us)


def split(amount: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Splits an amount by weight, with the largest-remainder method. The parts sum exactly to the amount. Ties go to
    the smaller key."""
    total = sum(weights.values())
    if total <= 0:
        raise ValueError("weights must sum to more than zero")
    exact = {key: Decimal(amount) * Decimal(str(weight)) / Decimal(str(total)) for key, weight in weights.items()}
    parts = {key: int(value) for key, value in exact.items()}
    left = amount - sum(parts.values())
    for key in sorted(exact, key=lambda k: (parts[k] - exact[k], k))[:left]:
        parts[key] += 1
    return parts


def format_usd(amount_micro_usd: int) -> str:
    """Formats an amount as `$1.23`. Amounts below ten cents get six digits, so that small runs do not look free."""
    usd = amount_micro_usd / MICRO
    return f"${usd:,.2f}" if amount_micro_usd == 0 or abs(usd) >= 0.1 else f"${usd:.6f}"
