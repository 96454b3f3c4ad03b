"""A team cannot fill the state store with jobs that it submits and stops."""

from __future__ import annotations

import pytest

from raytide.control.api.services.submission_rate import BURST_BYTES, BYTES_PER_H, CHANGE_BYTES, SubmissionRate
from raytide.core.errors import QuotaError
from raytide.core.objects.job import JobSpec


def spec(team: str, *, chars: int = 0, members: int = 1) -> JobSpec:
    shape = {"members": members, "resources": {"CPU": 1}}
    fields = {"kind": "gang", "name": "g", "team": team, "gang": {"shapes": [shape]}, "config": {"a": "x" * chars}}
    return JobSpec.parse(fields, where="job")


def fill(intake: SubmissionRate, large: dict[str, int]) -> tuple[int, QuotaError]:
    """Returns the number of specs that are taken, and the error of the next one."""
    for taken in range(10_000):
        try:
            intake.take(spec("evil", **large))
        except QuotaError as error:
            return taken, error
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize("large", [{"chars": 60_000}, {"members": 4096}])
def test_a_burst_is_taken_then_as_much_as_time_brings(large: dict[str, int]) -> None:
    now_s = 0.0
    intake = SubmissionRate(lambda: now_s)
    taken, refused = fill(intake, large)
    assert 50 < taken < 2000
    assert "Try again in" in refused.hint
    intake.take(spec("other", **large))
    now_s += 3600.0
    again, _ = fill(intake, large)
    assert again == pytest.approx(taken * BYTES_PER_H / BURST_BYTES, abs=2)


def test_a_sweep_of_a_thousand_usual_jobs_is_no_burst() -> None:
    intake = SubmissionRate(lambda: 0.0)
    for _ in range(1000):
        intake.take(spec("ana", chars=2000, members=8))


def test_changes_count_too() -> None:
    intake = SubmissionRate(lambda: 0.0)
    for _ in range(BURST_BYTES // CHANGE_BYTES):
        intake.take_change("evil")
    with pytest.raises(QuotaError):
        intake.take_change("evil")
    intake.take_change("other")
