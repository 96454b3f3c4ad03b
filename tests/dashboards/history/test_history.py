"""The history: what was written comes back, its bounds hold whatever is written, and a broken file is replaced."""

import math
import sqlite3
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytide.core.errors import StorageError, UsageError
from raytide.dashboards.history.points import (
    Point,
    Row,
    bucket_quantile,
    downsampled,
    increase,
    label_set,
    without_resets,
)
from raytide.dashboards.history.reader import MOST_STEPS, HistoryReader
from raytide.dashboards.history.schema import pack, unpack
from raytide.dashboards.history.writer import HistoryWriter

NOW_S = 1_700_000_000.0 - 1_700_000_000.0 % 600
NO_LABELS = label_set({})
values = st.floats(allow_nan=False, allow_infinity=False, width=32)


def write(
    history: HistoryWriter, at_s: float, metric: str, value: float, *, is_counter: bool = False, **labels: str
) -> None:
    history.write(at_s, [(history.series(metric, label_set(labels), is_counter), value)])


def test_points_come_back_as_they_were_written(tmp_path: Path) -> None:
    history = HistoryWriter(tmp_path / "h", low_bytes=0)
    for step in range(8):
        at_s = NOW_S + 15 * step
        one = history.series("up", label_set({"job": "a"}), False)
        other = history.series("up", label_set({"job": "b"}), False)
        history.write(at_s, [(one, step), (other, -step)])
    reader = HistoryReader(tmp_path / "h")
    assert reader.range("up", {"job": "b"}, NOW_S, NOW_S + 30) == [
        ((("job", "b"),), [(NOW_S, 0.0), (NOW_S + 15, -1.0), (NOW_S + 30, -2.0)])
    ]
    assert [labels for labels, _ in reader.range("up", {}, NOW_S, NOW_S)] == [(("job", "a"),), (("job", "b"),)]
    assert reader.range("down", {}, NOW_S, NOW_S) == []
    assert reader.metrics() == ("up",)


def test_a_restarted_writer_goes_on_with_the_same_series(tmp_path: Path) -> None:
    for step in range(3):
        history = HistoryWriter(tmp_path / "h", low_bytes=0)
        write(history, NOW_S + 15 * step, "up", step, job="a")
        assert len(history) == 1
        history.close()
    assert HistoryReader(tmp_path / "h").range("up", {}, 0, NOW_S + 100)[0][1] == [
        (NOW_S + 15 * step, float(step)) for step in range(3)
    ]


def test_old_points_come_from_coarser_levels_and_a_counter_rises_through_restarts(tmp_path: Path) -> None:
    history = HistoryWriter(tmp_path / "h", days=7, low_bytes=0)
    value, total = 0.0, 0.0
    steps = 6 * 240  # six hours: raw points are kept for four
    for step in range(steps + 1):
        value = 2.0 if step and step % 100 == 0 else value + 2.0  # restarts, and counts 2 in every step
        total += 2.0
        write(history, NOW_S + 15 * step, "n_total", value, is_counter=True)
    end_s = NOW_S + 15 * steps
    ((_, points),) = HistoryReader(tmp_path / "h").range("n_total", {}, NOW_S, end_s)
    assert all(b[0] > a[0] for a, b in pairwise(points))
    assert points[-1][1] == total
    assert points[1][0] - points[0][0] >= 60.0
    assert points[-1][0] - points[-2][0] == 15.0
    (curve,) = HistoryReader(tmp_path / "h").query("n", {}, NOW_S + 3600, end_s, 600.0, is_rate=True)
    assert [value for _, value in curve.points] == pytest.approx([2.0 / 15.0] * len(curve.points))
    assert len(curve.points) == 31


def test_a_rate_does_not_dip_where_the_resolution_changes(tmp_path: Path) -> None:
    history = HistoryWriter(tmp_path / "h", days=7, low_bytes=0)
    changes_s, end_s = 205 * 60.0, 2 * 86_400.0 + 205 * 60.0  # rows of a minute are kept for two days
    for after_s in (*range(0, 240 * 60, 30), *range(240 * 60, int(end_s), 600)):
        write(history, NOW_S + after_s, "n_total", 2.0 * after_s, is_counter=True)
    history._prune(NOW_S + end_s)
    start_s = NOW_S + changes_s
    (curve,) = HistoryReader(tmp_path / "h").query("n", {}, start_s - 3600, start_s + 1500, 300.0, is_rate=True)
    assert [value for _, value in curve.points[-6:]] == pytest.approx([2.0] * 6)


def test_a_counter_does_not_restart_when_the_clock_is_set_back(tmp_path: Path) -> None:
    history = HistoryWriter(tmp_path / "h", low_bytes=0)
    at_s, value = NOW_S, 1000.0
    for step in range(100):
        at_s += 15.0 if step != 60 else -307.0
        value += 15.0  # one a second
        write(history, at_s, "n_total", value, is_counter=True)
        if step > 60:
            ((_, points),) = HistoryReader(tmp_path / "h").range("n_total", {}, at_s - 300.0, at_s)
            assert increase(points) <= 625.0  # at most what was counted before and after the step


def test_a_quantile_is_that_of_each_step_and_sums_what_is_not_asked_for(tmp_path: Path) -> None:
    history = HistoryWriter(tmp_path / "h", low_bytes=0)
    for step in range(21):
        points = []
        for replica, (fast, slow) in {"a": (3, 4), "b": (0, 1)}.items():
            for le, count in (("0.1", fast), ("1.0", slow), ("+Inf", slow)):
                labels = label_set({"endpoint": "chat", "replica": replica, "le": le})
                points.append((history.series("wait_bucket", labels, True), float(count * step)))
        history.write(NOW_S + 15 * step, points)
    reader = HistoryReader(tmp_path / "h")
    (curve,) = reader.query("wait", {}, NOW_S + 60, NOW_S + 300, 60, quantile=0.5, by=("endpoint",))
    assert curve.labels == (("endpoint", "chat"),)
    assert [value for _, value in curve.points] == pytest.approx([0.1 * 2.5 / 3] * 5)
    assert len(reader.query("wait", {}, NOW_S + 60, NOW_S + 300, 60, quantile=0.5)) == 2


def test_a_curve_of_too_many_points_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=str(MOST_STEPS)):
        HistoryReader(tmp_path / "h").query("up", {}, 0, 1e6, 1)


@pytest.mark.parametrize("content", [b"no database", b"", None])
def test_a_broken_or_missing_file_is_replaced_and_said_so(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "h"
    if content is not None:
        path.write_bytes(content)
    history = HistoryWriter(path, low_bytes=0)
    assert bool(history.problem) == bool(content)
    assert history.replaced == bool(content)
    write(history, NOW_S, "up", 1.0)
    assert not history.problem
    assert HistoryReader(path).range("up", {}, 0, NOW_S)[0][1] == [(NOW_S, 1.0)]
    assert path.stat().st_mode & 0o077 == 0


def test_a_file_that_breaks_while_it_is_written_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "h"
    history = HistoryWriter(path, low_bytes=0)
    for step in range(50):
        write(history, NOW_S + step, "up", step)
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))
    with pytest.raises(StorageError):
        HistoryReader(path).range("up", {}, 0, NOW_S + 100)
    write(history, NOW_S + 100, "up", 7.0)
    assert "begins again" in history.problem
    assert HistoryReader(path).range("up", {}, 0, NOW_S + 200)[0][1] == [(NOW_S + 100, 7.0)]


@pytest.mark.parametrize("code", [sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_FULL])
def test_each_series_has_its_own_points_after_a_write_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A damaged file is replaced, and the write to a full disk is rolled back: ids are given again in both."""

    def fail(*_: object) -> None:
        error = sqlite3.OperationalError("it fails")
        error.sqlite_errorcode = code
        raise error

    history = HistoryWriter(tmp_path / "h", low_bytes=0)
    points = [(history.series("up", label_set({"job": job}), False), value) for job, value in (("a", 1.0), ("b", 2.0))]
    with monkeypatch.context() as broken:
        broken.setattr(HistoryWriter, "_insert", fail)
        assert not history.write(NOW_S, points)
    assert history.write(NOW_S, reversed(points))
    assert HistoryReader(tmp_path / "h").range("up", {}, NOW_S, NOW_S) == [
        ((("job", "a"),), [(NOW_S, 1.0)]),
        ((("job", "b"),), [(NOW_S, 2.0)]),
    ]


def test_a_missing_file_and_one_of_another_version_hold_nothing(tmp_path: Path) -> None:
    assert HistoryReader(tmp_path / "none").range("up", {}, 0, 1) == []
    with sqlite3.connect(tmp_path / "new") as other:
        other.execute("PRAGMA user_version = 99")
    assert HistoryReader(tmp_path / "new").metrics() == ()


def test_nothing_is_written_when_the_disk_is_nearly_full(tmp_path: Path) -> None:
    history = HistoryWriter(tmp_path / "h", low_bytes=1 << 62)
    write(history, NOW_S, "up", 1.0)
    assert "disk" in history.problem
    assert HistoryReader(tmp_path / "h").metrics() == ()


def test_series_without_points_make_room_for_new_ones_and_live_ones_do_not(tmp_path: Path) -> None:
    history = HistoryWriter(tmp_path / "h", most_series=20, low_bytes=0)
    for number in range(20):
        write(history, NOW_S, "up", 1.0, node=str(number))
    write(history, NOW_S + 15, "up", 1.0, node="new")
    assert (len(history), history.dropped) == (20, 1)
    write(history, NOW_S + 1000, "up", 1.0, node="19")
    write(history, NOW_S + 1000, "up", 2.0, node="newer")
    assert len(history) <= 20
    found = {dict(labels)["node"] for labels, _ in HistoryReader(tmp_path / "h").range("up", {}, 0, NOW_S + 2000)}
    assert {"newer", "19"} <= found


def test_a_write_looks_once_for_series_to_forget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = HistoryWriter(tmp_path / "h", most_series=10, low_bytes=0)
    looks: list[float] = []
    find = history._forget_oldest
    monkeypatch.setattr(history, "_forget_oldest", lambda at_s: (looks.append(at_s), find(at_s))[1])
    points = [(history.series("up", label_set({"node": str(number)}), False), 1.0) for number in range(100)]
    for at_s in (NOW_S, NOW_S + 15.0):
        assert history.write(at_s, points)
    assert (looks, len(history), history.dropped) == ([NOW_S, NOW_S + 15.0], 10, 180)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_bounds_hold_for_hostile_input(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("h") / "h"
    most_bytes, at_s = 64 * 4096, NOW_S
    history = HistoryWriter(path, days=1, most_series=30, most_bytes=most_bytes, low_bytes=0)
    for _ in range(data.draw(st.integers(1, 12))):
        at_s += data.draw(st.sampled_from([15.0, 15.0, 61.0, 700.0, 86_400.0, -30.0, 1e9, -1e9]))
        labels = data.draw(st.lists(st.text(max_size=60), max_size=60))
        points = [
            (
                history.series(f"m{len(text) % 7}", label_set({"a": text, "b": "x" * 1000}), len(text) % 2 == 0),
                data.draw(st.floats()),
            )
            for text in labels
        ]
        history.write(at_s, points)
        assert len(history) <= 30
        assert path.stat().st_size <= most_bytes
        assert path.with_name("h-wal").stat().st_size <= 3 * most_bytes + (8 << 20)
        assert history.replaced == 0
    for metric in HistoryReader(path).metrics():
        for _, found in HistoryReader(path).range(metric, {}, 0, 1e12):
            times = [when_s for when_s, _ in found]
            assert times == sorted(times)


def test_a_history_that_grows_for_days_keeps_within_its_bytes_and_drops_the_oldest(tmp_path: Path) -> None:
    most_bytes, steps = 64 * 4096, 2000
    history = HistoryWriter(tmp_path / "h", most_bytes=most_bytes, low_bytes=0)
    names = [history.series("up", label_set({"node": str(number)}), False) for number in range(50)]
    for step in range(steps):
        history.write(NOW_S + 15 * step, [(series, math.sin(step * id(series))) for series in names])
        assert not history.problem
    assert (tmp_path / "h").stat().st_size <= most_bytes
    found = HistoryReader(tmp_path / "h").range("up", {"node": "3"}, 0, NOW_S + 15 * steps)
    assert found[0][1][-1][0] == NOW_S + 15 * (steps - 1)


@given(st.dictionaries(st.integers(0, 2**32 - 1), st.tuples(st.integers(1, 2**32 - 1), values, values, values)))
def test_a_row_of_many_series_is_unpacked_as_it_was_packed(rows: dict[int, tuple[int, float, float, float]]) -> None:
    named = {id: Row(*row) for id, row in rows.items()}
    assert dict(unpack(pack(named, 1), 1)) == named
    assert dict(unpack(pack(named, 0), 0)) == {id: Row(1, r.last, r.last, r.last) for id, r in named.items()}


@given(st.lists(st.lists(values, min_size=1), min_size=1))
def test_downsampling_twice_keeps_sums_last_and_highest_values(steps: list[list[float]]) -> None:
    rows = [downsampled([Row(1, value, value, value) for value in step], False, None) for step in steps]
    whole = downsampled(rows, False, None)
    every = [value for step in steps for value in step]
    assert whole.count == len(every)
    assert whole.sum == pytest.approx(math.fsum(every), rel=1e-6, abs=1e-6 * max(map(abs, every)) * len(every))
    assert (whole.last, whole.max) == (every[-1], max(every))


@given(st.lists(st.lists(st.integers(0, 1000).map(float), min_size=1, max_size=5), min_size=1, max_size=8))
def test_downsampling_a_counter_keeps_its_increase_through_restarts(steps: list[list[float]]) -> None:
    rows: list[tuple[float, Row]] = []
    before: float | None = None
    for number, step in enumerate(steps):
        rows.append((float(number), downsampled([Row(1, v, v, v) for v in step], True, before)))
        before = step[-1]
    every: list[Point] = [(float(at), value) for at, value in enumerate(value for step in steps for value in step)]
    found = without_resets(rows)
    assert found[-1][1] - found[0][1] == increase(every[len(steps[0]) - 1 :])


@given(
    st.lists(st.integers(0, 50), min_size=2, max_size=8),
    st.floats(0, 1),
)
def test_a_quantile_lies_in_the_bucket_of_its_rank(counts: list[int], q: float) -> None:
    bounds = [*range(1, len(counts)), math.inf]
    cumulative = {float(bound): float(sum(counts[: i + 1])) for i, bound in enumerate(bounds)}
    found = bucket_quantile(q, cumulative)
    total = sum(counts)
    if total == 0 or (q * total == 0 and counts[0] == 0):  # as Prometheus, which divides zero by zero
        assert math.isnan(found)
        return
    index = next(i for i, bound in enumerate(bounds) if cumulative[bound] >= q * total)
    if index == len(bounds) - 1:
        assert found == bounds[-2]
    else:
        assert index <= found <= index + 1
