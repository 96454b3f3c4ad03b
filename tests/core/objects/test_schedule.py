"""Scheduled minimums of node types: by local hours and weekdays, through changes of the clocks."""

import sys
import zoneinfo
from collections.abc import Iterator
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from raytide.autoscaler.planner import plan
from raytide.core.errors import ConfigError
from raytide.core.objects.node import WEEKDAYS, NodeType, ScheduledMinimum
from raytide.core.objects.plan import Launch
from raytide.core.objects.snapshot import Snapshot

BERLIN = ZoneInfo("Europe/Berlin")
hours = st.integers(0, 23).map(lambda hour: f"{hour:02}:30")


def entry(**fields: object) -> ScheduledMinimum:
    return ScheduledMinimum.parse({"min": 3, "time_zone": "Europe/Berlin", **fields}, where="schedule")


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN).timestamp()


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("2026-11-20 19:59", True),  # a Friday
        ("2026-11-20 20:00", False),
        ("2026-11-20 07:59", False),
        ("2026-11-21 12:00", False),
        ("2026-03-30 08:00", True),  # the day after the clocks went forward
        ("2026-10-26 08:00", True),  # the day after they went back
    ],
)
def test_working_hours_follow_the_clocks_of_the_zone(text: str, holds: bool) -> None:
    assert entry(days=["mon", "tue", "wed", "thu", "fri"], begin="08:00", end="20:00").holds(at(text)) is holds


@pytest.fixture
def without_time_zones() -> Iterator[None]:
    before = zoneinfo.TZPATH
    zoneinfo.reset_tzpath(to=[])
    ZoneInfo.clear_cache()
    yield
    zoneinfo.reset_tzpath(to=before)


@pytest.mark.usefixtures("without_time_zones")
def test_utc_needs_no_database_of_time_zones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tzdata", None)  # the package that zoneinfo reads where the system has none
    noon = datetime(2026, 11, 20, 12, tzinfo=UTC).timestamp()
    assert ScheduledMinimum(min=3, begin="08:00", end="20:00").holds(noon)
    with pytest.raises(ConfigError, match=r"no time zone 'Europe/Berlin'; this machine knows only UTC: .* tzdata"):
        entry()


def test_a_night_belongs_to_the_day_on_which_it_begins() -> None:
    night = entry(days=["fri"], begin="22:00", end="06:00")
    assert [night.holds(at(f"2026-11-{text}")) for text in ("20 21:59", "20 22:00", "21 05:59", "21 06:00")] == [
        False,
        True,
        True,
        False,
    ]
    assert not night.holds(at("2026-11-20 05:00"))


@given(hours, hours, st.integers(0, 4_000_000_000), st.sampled_from(["Europe/Berlin", "America/New_York", "UTC"]))
def test_hours_and_the_rest_of_the_day_cover_every_moment_once(begin: str, end: str, at_s: int, zone: str) -> None:
    if begin != end:
        one, other = (entry(begin=a, end=b, time_zone=zone) for a, b in ((begin, end), (end, begin)))
        assert one.holds(at_s) != other.holds(at_s)


@given(st.integers(0, 4_000_000_000))
def test_every_moment_is_on_one_day_of_the_week(at_s: int) -> None:
    assert sum(entry(days=[day]).holds(at_s) for day in WEEKDAYS) == 1


@given(st.lists(st.tuples(st.integers(0, 9), hours, hours), max_size=5), st.integers(0, 4_000_000_000))
def test_the_largest_minimum_that_holds_counts_and_never_exceeds_the_maximum(
    entries: list[tuple[int, str, str]], at_s: int
) -> None:
    made = tuple(entry(min=least, begin=begin, end=end) for least, begin, end in entries if begin != end)
    found = NodeType(name="a", resources={"CPU": 1}, price_micro_usd_h=1, min_nodes=2, max_nodes=5, schedule=made)
    holding = [each.min for each in made if each.holds(at_s)]
    assert found.at(at_s).min_nodes == (min(max(holding), 5) if holding else 2)


def test_nodes_are_bought_for_the_hours_of_the_schedule() -> None:
    working = entry(days=["fri"], begin="08:00", end="20:00")
    fleet = NodeType(name="a", resources={"CPU": 1}, price_micro_usd_h=1, schedule=(working,))
    launched = []
    for text in ("2026-11-20 12:00", "2026-11-20 21:00"):
        actions = plan(Snapshot(at(text), (fleet.at(at(text)),)))
        launched.append([action.reason.partition(";")[0] for action in actions if isinstance(action, Launch)])
    assert launched == [["min_nodes of a is 3 by its schedule"] * 3, []]


def test_hours_are_read_as_yaml_writes_them() -> None:
    read = entry(**yaml.safe_load("{begin: 08:00, end: 20:00}"))
    assert (read.begin, read.end) == ("08:00", "20:00")


@pytest.mark.parametrize(
    "fields",
    [{"begin": "25:00"}, {"begin": 1500}, {"end": "8"}, {"time_zone": "Mars"}, {"days": ["mo"]}, {"end": "00:00"}],
)
def test_hours_that_make_no_sense_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        entry(**fields)
