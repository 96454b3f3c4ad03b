"""Deadlines are parsed, and mean the same after they were stored."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from raytide.core.clock import moment, parse_deadline
from raytide.core.errors import ConfigError
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import JobKind, JobSpec

MORNING = datetime(2026, 11, 22, 8, tzinfo=UTC)


def spec(deadline: object) -> JobSpec:
    gang = GangSpec(shapes=(Shape(resources={"CPU": 1.0}),))
    return JobSpec.parse({"kind": JobKind.GANG, "name": "j", "gang": gang, "deadline": deadline}, where="job")


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("8h", timedelta(hours=8)),
        ("1d12h", timedelta(hours=36)),
        ("90m", timedelta(minutes=90)),
        (5400, timedelta(minutes=90)),
        ("5400", timedelta(minutes=90)),
        (timedelta(hours=1), timedelta(hours=1)),
        ("2026-11-22T08:00:00Z", MORNING),
        ("2026-11-22T09:00+01:00", MORNING),
        (datetime(2026, 11, 22, 3, tzinfo=timezone(-timedelta(hours=5))), MORNING),
    ],
)
def test_a_deadline_is_a_moment_or_a_time_from_now(said: object, meant: object) -> None:
    assert parse_deadline(said) == meant


_FAR = ["inf", "nan", "1e20", 1e20, "99999999999d", "0001-01-01T00:00:00+05:00", "101000d"]


@pytest.mark.parametrize("said", ["soon", "8 hours", "h", "", True, None, "2026-11-22T08:00", *_FAR])
def test_what_is_no_time_or_has_no_zone_is_refused_with_what_to_say(said: object) -> None:
    with pytest.raises(ValueError, match="use 2026-"):
        parse_deadline(said)


@pytest.mark.parametrize("said", ["8h", "14d", 5400.5, 123456.789, 0, "2026-11-22T08:00:00.250+01:00"])
def test_a_stored_spec_has_the_same_deadline(said: object) -> None:
    before = spec(said)
    assert JobSpec.model_validate(before.model_dump(mode="json")) == before
    assert JobSpec.model_validate(before.model_dump()) == before


def test_a_bad_deadline_names_its_field() -> None:
    with pytest.raises(ConfigError, match="deadline: 'soon' is not a time"):
        spec("soon")


def test_only_a_moment_is_seconds_since_the_epoch() -> None:
    assert spec("8h").due_at_s is None
    assert spec(MORNING).due_at_s == MORNING.timestamp()
    assert moment(MORNING.timestamp()) == "Nov 22 08:00 UTC"


@pytest.mark.parametrize("at_s", [1e15, -1e15, float("inf"), float("-inf"), float("nan")])
def test_any_number_is_some_moment(at_s: float) -> None:
    assert moment(at_s).endswith(" UTC")
