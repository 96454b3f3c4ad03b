"""The next time of a scheduled flow: a pure function of its schedule, the time and what its inputs were."""

from __future__ import annotations

from datetime import UTC, datetime

from raytide.workflows.spec import ScheduleSpec


def next_time_s(schedule: ScheduleSpec, now_s: float) -> float | None:
    """Returns the first time after `now_s` that the cron expression names; None without one."""
    if not schedule.cron:
        return None
    from cronsim import CronSim

    return next(CronSim(schedule.cron, datetime.fromtimestamp(now_s, UTC))).timestamp()


def begins_because(schedule: ScheduleSpec, next_at_s: float | None, now_s: float, before: str, inputs: str) -> str:
    """Returns why the next cycle begins now; empty if it does not.

    `before` is the fingerprint of the inputs in the last cycle, `inputs` the present one. A time that passed while no
    driver ran counts once.
    """
    if next_at_s is not None and now_s >= next_at_s:
        return f"the schedule {schedule.cron}"
    if schedule.new_data_every_s is not None and inputs != before:
        return "its inputs changed"
    return ""
