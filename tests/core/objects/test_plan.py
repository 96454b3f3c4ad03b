"""The stored form of a plan."""

from __future__ import annotations

from raytide.core.objects.plan import MOST_WAITS, Plan, Scale, Wait


def test_of_a_long_queue_the_first_waits_are_kept_and_all_that_is_no_job_s() -> None:
    waits = tuple(Wait(f"job-{n}", "behind", "it waits") for n in range(5000))
    others = (Scale("m", 2, "more load"), Wait("node-1", "signal", "its GPU is in use"))
    kept = Plan(1.0, (*waits, *others)).for_storage()
    assert kept.actions[: MOST_WAITS + 2] == (*waits[:MOST_WAITS], *others)
    (last,) = kept.actions[MOST_WAITS + 2 :]
    assert isinstance(last, Wait)
    assert last.reason == "4900 more jobs wait"
    short = Plan(1.0, (*waits[:MOST_WAITS], *others))
    assert short.for_storage() == short
