"""The figures of a report, from requests whose times are given."""

from __future__ import annotations

import io
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from raytide.sdk.bench.load.report import BenchReport, Distribution, GeneratorLoad, in_flight, is_good, report_of
from raytide.sdk.bench.load.spec import BenchSpec, Slo
from raytide.sdk.bench.load.stream import BenchRecord

TIMES = st.floats(0.0, 100.0)
IDLE = GeneratorLoad.measured(0.1, 10.0, [0.0001] * 200, [0.0001] * 200)


def record(ttft_s: float, gaps_s: list[float], sent_s: float = 0.0) -> BenchRecord:
    tokens = 1 + len(gaps_s)
    e2e_s = ttft_s + sum(gaps_s)
    return BenchRecord(sent_s, sent_s, ttft_s, e2e_s, array("d", gaps_s), prompt_tokens=10, usage_tokens=tokens)


def report(records: list[BenchRecord], load: GeneratorLoad = IDLE, **fields: object) -> BenchReport:
    spec = BenchSpec.parse({"base_url": "http://here/v1", "model": "m", **fields}, where="bench")
    return report_of(spec, records, 2.0, load, is_interrupted=False)


def printed(found: BenchReport) -> str:
    console = Console(width=120, file=io.StringIO())
    with console.capture() as captured:
        console.print(found.table())
    return captured.get()


def test_the_mean_time_of_a_token_is_that_of_those_after_the_first() -> None:
    found = report([record(0.5, [0.1, 0.3]), record(0.25, [])])
    assert (found.tpot_s.n, found.tpot_s.p50) == (1, 0.2)
    assert (found.ttft_s.n, found.ttft_s.mean, found.ttft_s.max) == (2, 0.375, 0.5)
    assert (found.output_tokens, found.output_tokens_per_s, found.total_tokens_per_s) == (4, 2.0, 12.0)


@given(values=st.lists(TIMES, min_size=1, max_size=300))
def test_a_percentile_has_enough_values_above_it(values: list[float]) -> None:
    found = Distribution.of_values(values)
    assert (found.n, found.max) == (len(values), max(values))
    for percent in (90, 95, 99):
        value = getattr(found, f"p{percent}")
        assert (value is None) == (len(values) * (100 - percent) < 100)
        if value is not None:
            assert min(values) <= value <= max(values)
    assert found.tail is not None and found.tail <= max(values)


@given(st.lists(st.tuples(TIMES, st.one_of(st.none(), TIMES)), max_size=50))
def test_open_requests_add_up(times: list[tuple[float, float | None]]) -> None:
    found = in_flight([BenchRecord(0.0, sent_s, None, e2e_s) for sent_s, e2e_s in times])
    unfinished = sum(e2e_s is None for _, e2e_s in times)
    assert all(0 <= count <= len(times) for _, count in found)
    assert [count for _, count in found][-1:] == ([unfinished] if times else [])
    assert [at for at, _ in found] == sorted(at for at, _ in found)


def test_a_request_is_good_if_it_kept_all_that_it_can_be_held_to() -> None:
    fast, slow, one_token = record(0.1, [0.01]), record(0.1, [0.5]), record(0.1, [])
    slo = Slo(ttft_s=0.2, tpot_s=0.1)
    assert [is_good(each, slo) for each in (fast, slow, one_token)] == [True, False, True]
    found = report([fast, slow, one_token], slo={"ttft_s": 0.2, "tpot_s": 0.1})
    assert (found.good_requests, found.goodput_per_s) == (2, 1.0)
    assert "66.7% of all, kept first token 200 ms, token 100 ms" in printed(found)


def test_the_table_has_every_figure_and_leaves_open_what_too_few_values_tell() -> None:
    text = printed(report([record(0.0123, [0.02] * 3) for _ in range(12)]))
    assert "first token" in text and "12.3" in text
    (row,) = (line for line in text.splitlines() if "first token" in line)
    assert row.count(" - ") == 2, "p95 and p99 of 12 requests are not known"
    assert "12 of 12 answered" in text and "BOTTLENECK" not in text


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (GeneratorLoad.measured(9.0, 10.0, [], []), "it used 90% of its core"),
        (GeneratorLoad.measured(0.1, 10.0, [0.03] * 200, []), "30.0 ms late"),
        (GeneratorLoad.measured(0.1, 10.0, [], [0.04] * 200), "40.0 ms late"),
    ],
)
def test_a_generator_that_was_the_bottleneck_says_so(load: GeneratorLoad, why: str) -> None:
    found = report([record(0.1, [0.1])], load)
    assert why in found.bottleneck
    assert why in printed(found)


def test_a_generator_may_be_late_by_what_does_not_show() -> None:
    late = GeneratorLoad.measured(0.1, 10.0, [0.03] * 200, [])
    assert report([record(3.0, [0.1])], late).bottleneck == ""


def test_a_load_without_any_answer_has_a_report() -> None:
    found = report([BenchRecord(0.0, error="timeout", e2e_s=1.0)])
    assert found.errors == {"timeout": 1}
    assert "1 timeout" in printed(found)
    assert found.plot().svg().startswith("<svg ")
