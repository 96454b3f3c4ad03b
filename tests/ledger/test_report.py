"""Whichever way costs are grouped, the rows are the whole ledger: to the micro-dollar."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.stores import new_store

from raytide.core.money import cumulative, micro_usd
from raytide.core.objects.ledger_entry import DAY_US, Entry, EntryKind, Line, OpenInterval, Share
from raytide.core.state import Changes
from raytide.ledger.book import book, close, lost, open_interval
from raytide.ledger.report import By, accrued, as_lines, rates, rows

NOW_US = int(datetime(2026, 11, 21, 12, tzinfo=UTC).timestamp()) * 1_000_000
HOUR_US = 3_600_000_000


def line(kind: EntryKind, subject: str, team: str, amount: int, day: int = 0, node: str = "node-1") -> Line:
    return Line(kind, subject, team, node, day, amount)


LINES = [
    line(EntryKind.JOB, "job-1", "blue", 30, 5),
    line(EntryKind.STARTUP, "job-1", "blue", 4, 5, "node-2"),
    line(EntryKind.ENDPOINT, "chat", "red", 20, 6),
    line(EntryKind.IDLE, "", "", 7, 6),
]
TAGS = {"job-1": {"project": "p", "model": "llama"}, "chat": {"project": "p", "model": "/m/chat"}}


def grouped(by: By) -> dict[str, int]:
    return {row.key: row.amount_micro_usd for row in rows(LINES, {}, by, TAGS, NOW_US)}


def test_rows_by_every_way_to_group() -> None:
    assert grouped("team") == {"blue": 34, "red": 20, "(idle)": 7}
    assert grouped("job") == {"job-1": 34, "chat": 20, "(idle)": 7}
    assert grouped("project") == {"p": 54, "(idle)": 7}
    assert grouped("model") == {"llama": 34, "/m/chat": 20, "(idle)": 7}
    assert grouped("node") == {"node-1": 57, "node-2": 4}
    assert grouped("day") == {"1970-01-06": 34, "1970-01-07": 27}


def test_lost_work_is_its_owners_cost_and_says_what_it_was_lost_to() -> None:
    pair = [line(EntryKind.JOB, "job-1", "blue", -12, 5), line(EntryKind.WASTE, "job-1", "blue", 12, 5)]
    losses = [
        Line(EntryKind.WASTE, "job-1", "blue", "node-1", 5, amount, cause)
        for cause, amount in (("node-4", 3), ("job-7", 9))
    ]
    for by, key in (("job", "job-1"), ("team", "blue"), ("model", "llama"), ("day", "1970-01-06")):
        found = {row.key: row for row in rows([*LINES, *pair], {}, by, TAGS, NOW_US, losses)}
        assert (found[key].amount_micro_usd, found[key].lost_micro_usd) == (34, 12)
        assert found[key].lost_to == ("job-7", "node-4")


def test_the_forecast_goes_on_to_the_end_of_the_month() -> None:
    shares = (Share(EntryKind.JOB, "job-1", "blue", 0.75), Share(EntryKind.IDLE, "", "", 0.25))
    now = rates([OpenInterval("node-1", micro_usd(8), 0, 0, shares)])
    found = {row.key: row for row in rows(LINES, now, "team", TAGS, NOW_US)}
    assert found["blue"].micro_usd_h == micro_usd(6)
    left_h = 9 * 24 + 12  # of November
    assert found["blue"].forecast_micro_usd == 34 + left_h * micro_usd(6)
    assert found["red"].forecast_micro_usd == 20
    assert found["(idle)"].forecast_micro_usd == 7 + left_h * micro_usd(2)


entries = st.builds(
    Entry,
    node_id=st.sampled_from(["node-1", "node-2"]),
    from_us=st.integers(0, 3 * DAY_US),
    to_us=st.just(4 * DAY_US),
    kind=st.sampled_from(EntryKind),
    subject=st.sampled_from(["", "job-1", "chat", "job-3"]),
    team=st.sampled_from(["", "blue", "red"]),
    price_micro_usd_h=st.just(1),
    amount_micro_usd=st.integers(-100, 10**9),
)


@given(st.lists(entries, max_size=30), st.sampled_from(get_args(By)))
def test_the_rows_sum_to_the_entries(booked: list[Entry], by: By) -> None:
    found = rows(as_lines(booked), {}, by, TAGS, NOW_US)
    assert sum(row.amount_micro_usd for row in found) == sum(entry.amount_micro_usd for entry in booked)


class Books(RuleBasedStateMachine):
    """Nodes come, change hands, end earlier than was known; whatever happens, the sums are the bill, exactly."""

    def __init__(self) -> None:
        super().__init__()
        from tempfile import TemporaryDirectory

        self.folder = TemporaryDirectory()
        self.store = new_store(Path(self.folder.name))
        self.now_us = NOW_US
        self.open: dict[str, OpenInterval] = {}
        self.ended: dict[str, int] = {}
        self.count = 0

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    @rule(price=st.integers(0, 10**9))
    def buy(self, price: int) -> None:
        self.count += 1
        name = f"node-{self.count}"
        self.open[name] = open_interval(name, price, self.now_us, (Share(EntryKind.IDLE, "", "", 1.0),))
        self.store.commit(Changes(0.0, intervals=(self.open[name],)))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), seconds=st.floats(0.001, 100_000), weight=st.floats(0.01, 0.99))
    def hold(self, data: st.DataObject, seconds: float, weight: float) -> None:
        self.now_us += round(seconds * 1e6)
        name = data.draw(st.sampled_from(sorted(self.open)))
        who = data.draw(st.sampled_from(["job-1", "job-2"]))
        shares = (Share(EntryKind.IDLE, "", "", 1 - weight), Share(EntryKind.JOB, who, "blue", weight))
        due, after = book(self.open[name], self.now_us, shares)
        self.open[name] = after
        self.store.commit(Changes(0.0, entries=due, intervals=(after,)))

    @rule(who=st.sampled_from(["job-1", "job-2"]), seconds=st.floats(0.001, 100_000), ago_s=st.floats(0, 1000))
    def lose(self, who: str, seconds: float, ago_s: float) -> None:
        until_us, lost_us = self.now_us - round(ago_s * 1e6), round(seconds * 1e6)
        mine = self.store.books.entries(subject=who, ending_after_us=until_us - lost_us)
        self.store.commit(Changes(0.0, entries=lost(mine, until_us, lost_us, "job-9")))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), early_s=st.floats(0, 200))
    def end(self, data: st.DataObject, early_s: float) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        interval = self.open.pop(name)
        end_us = max(interval.origin_us, self.now_us - round(early_s * 1e6))
        booked = self.store.books.entries(node_id=name, ending_after_us=end_us)
        self.store.commit(Changes(0.0, entries=close(interval, end_us, booked), closed=(name,)))
        self.ended[name] = cumulative(interval.price_micro_usd_h, interval.origin_us, end_us)

    @invariant()
    def what_is_booked_and_accrued_is_the_bill(self) -> None:
        of_node = self.store.books.booked("node")
        pending = accrued(self.open.values(), self.now_us)
        for name, bill in self.ended.items():
            assert of_node.get(name, 0) == bill
        for name, interval in self.open.items():
            now = sum(entry.amount_micro_usd for entry in pending if entry.node_id == name)
            bill = cumulative(interval.price_micro_usd_h, interval.origin_us, self.now_us)
            assert of_node.get(name, 0) + now == bill

    @invariant()
    def the_running_sums_are_those_of_the_entries(self) -> None:
        books = self.store.books
        total = sum(entry.amount_micro_usd for entry in books.entries())
        assert sum(books.booked("kind").values()) == total
        assert sum(line.amount_micro_usd for line in books.lines()) == total
        assert sum(line.amount_micro_usd for line in books.lines(with_node=True, with_day=True)) == total
        wasted = sum(line.amount_micro_usd for line in books.losses())
        assert wasted == sum(e.amount_micro_usd for e in books.entries() if e.kind is EntryKind.WASTE)
        assert all(line.amount_micro_usd >= 0 for line in books.lines(with_node=True))


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=4, stateful_step_count=10, deadline=None)
