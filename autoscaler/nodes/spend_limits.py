"""The limits on the fleet's cost per hour. They are the configured limits, lowered if needed so that the month's budget
lasts.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from raytide.core.money import micro_usd
from raytide.core.objects.cluster_config import LimitsSection
from raytide.core.objects.snapshot import Limits

SOFT_SHARE = 0.8
"""The share of the hourly rate that the month's budget allows, above which only spot is bought."""
LEAST_LEFT_H = 1.0
"""The least time that a month's remaining budget must last, also in the month's last hour."""


def limits(section: LimitsSection, spent_micro_usd: int, now_s: float) -> Limits:
    """Returns limits on the fleet's cost per hour. As long as the fleet stays within these limits, the month's budget
    lasts until the end of the month.

    `spent_micro_usd` is the cost since the beginning of the month.
    """
    soft = None if section.soft_usd_h is None else micro_usd(section.soft_usd_h)
    hard = most = None if section.hard_usd_h is None else micro_usd(section.hard_usd_h)
    if section.month_usd is not None:
        left, left_h = max(0, micro_usd(section.month_usd) - spent_micro_usd), (month_end_s(now_s) - now_s) / 3600.0
        rate, to_the_end = int(left / max(LEAST_LEFT_H, left_h)), int(left / left_h)
        soft = min(int(SOFT_SHARE * rate), soft if soft is not None else rate)
        hard = min(rate, hard if hard is not None else rate)
        most = min(to_the_end, most if most is not None else to_the_end)
    return Limits(
        soft,
        hard,
        section.launches_per_min,
        section.moves_after_s,
        shrink_for_serving=section.shrink_for_serving,
        most_micro_usd_h=most,
    )


def month_end_s(now_s: float) -> float:
    """Returns the first instant of the next month in UTC, as Unix time in seconds."""
    first = datetime.fromtimestamp(now_s, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return (first + timedelta(days=32)).replace(day=1).timestamp()
