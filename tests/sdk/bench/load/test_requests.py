"""Lengths, prompts and arrivals of a load."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.core.errors import ConfigError, DataError
from raytide.sdk.bench.load.requests import (
    FIRST_TOKEN,
    LAST_TOKEN,
    MOONCAKE_BLOCK,
    BenchRequest,
    requests_of,
    warm_up_of,
)
from raytide.sdk.bench.load.spec import BenchSpec, Slo


def spec(**fields: Any) -> BenchSpec:
    return BenchSpec.parse({"base_url": "http://here/v1", "model": "m", **fields}, where="bench")


def made(**fields: Any) -> list[BenchRequest]:
    return list(requests_of(spec(**fields)))


@given(seed=st.integers(0, 2**40), low=st.integers(1, 50), more=st.integers(0, 50), count=st.integers(1, 20))
def test_lengths_are_in_their_range_and_the_seed_decides_everything(seed: int, low: int, more: int, count: int) -> None:
    fields = {
        "seed": seed,
        "requests": count,
        "prompt_tokens": (low, low + more),
        "output_tokens": f"{low}:{low + more}",
    }
    found = made(**fields)
    assert len(found) == count
    assert found == made(**fields)
    for request in found:
        assert low <= request.prompt_tokens <= low + more
        assert low <= request.output_tokens <= low + more
        assert all(FIRST_TOKEN <= token <= LAST_TOKEN for token in request.prompt)  # type: ignore[operator]
        assert request.at_s is None


@given(rate=st.floats(0.5, 1000), seed=st.integers(0, 1000), poisson=st.booleans())
def test_an_open_loop_arrives_in_order_and_begins_at_once(rate: float, seed: int, poisson: bool) -> None:
    at_s = [request.at_s for request in made(rate=rate, poisson=poisson, seed=seed, requests=50, prompt_tokens=1)]
    assert at_s[0] == 0.0
    assert at_s == sorted(at_s)  # type: ignore[type-var]
    if not poisson:
        assert at_s == pytest.approx([number / rate for number in range(50)])


def test_the_gaps_of_a_poisson_load_are_exponential() -> None:
    at_s = [request.at_s or 0.0 for request in made(rate=10.0, poisson=True, requests=4000, prompt_tokens=1)]
    gaps = [after - before for before, after in pairwise(at_s)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.1, rel=0.08)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.08)


def test_a_time_ends_an_open_loop() -> None:
    assert len(made(rate=10.0, duration_s=2.05, prompt_tokens=1)) == 21
    assert len(made(rate=10.0, duration_s=2.05, requests=3, prompt_tokens=1)) == 3


def test_other_lengths_leave_the_arrivals_as_they_are() -> None:
    short, long = (made(rate=5.0, poisson=True, requests=9, prompt_tokens=n) for n in (1, 99))
    assert [each.at_s for each in short] == [each.at_s for each in long]


def test_the_warm_up_has_the_lengths_of_the_first_requests_and_other_prompts() -> None:
    load = spec(prompt_tokens="3:90", output_tokens="1:9", warmup=5)
    first, warm = list(islice(requests_of(load), 5)), list(warm_up_of(load))
    assert [(each.prompt_tokens, each.output_tokens) for each in warm] == [
        (each.prompt_tokens, each.output_tokens) for each in first
    ]
    assert all(a.prompt != b.prompt for a, b in zip(first, warm, strict=True))


def lines(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_prompts_of_a_trace_share_what_their_blocks_share(tmp_path: Path) -> None:
    trace = lines(
        tmp_path / "trace.jsonl",
        {"timestamp": 27_000, "input_length": 600, "output_length": 52, "hash_ids": [7, 8]},
        {"timestamp": 30_000, "input_length": 700, "output_length": 26, "hash_ids": [7, 9]},
    )
    first, second = made(trace=trace)
    assert (first.at_s, second.at_s) == (0.0, 3.0)
    assert (first.prompt_tokens, first.output_tokens) == (600, 52)
    assert first.prompt[:MOONCAKE_BLOCK] == second.prompt[:MOONCAKE_BLOCK]
    assert first.prompt[MOONCAKE_BLOCK:] != second.prompt[MOONCAKE_BLOCK:600]


def test_a_trace_is_sent_faster_and_with_shorter_prompts(tmp_path: Path) -> None:
    rows = [{"timestamp": 1000 * n, "input_length": 1024, "output_length": 64, "hash_ids": [1, n]} for n in range(4)]
    found = made(trace=lines(tmp_path / "t.jsonl", *rows), trace_speed=2.0, trace_scale=1 / 32)
    assert [each.at_s for each in found] == [0.0, 0.5, 1.0, 1.5]
    assert {(each.prompt_tokens, each.output_tokens) for each in found} == {(32, 2)}
    assert found[0].prompt[:16] == found[3].prompt[:16]
    assert found[0].prompt[16:] != found[3].prompt[16:]


def test_raytide_s_own_traces_are_lines_or_columns(tmp_path: Path) -> None:
    rows = [{"t_s": 5.0, "prompt_tokens": 3, "output_tokens": 2}, {"t_s": 4.0, "prompt_tokens": 7, "output_tokens": 1}]
    (tmp_path / "t.csv").write_text("t_s,prompt_tokens,output_tokens\n5.0,3,2\n4.0,7,1\n")
    for trace in (lines(tmp_path / "t.jsonl", *rows), str(tmp_path / "t.csv")):
        assert [(each.at_s, each.prompt_tokens, each.output_tokens) for each in made(trace=trace)] == [
            (0.0, 7, 1),
            (1.0, 3, 2),
        ]


def test_prompts_of_a_file_are_sent_in_their_order_and_again(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n\ntwo words\n")
    found = made(prompts=str(tmp_path / "p.txt"), requests=3, output_tokens=9)
    assert [(each.prompt, each.output_tokens) for each in found] == [("one", 9), ("two words", 9), ("one", 9)]
    named = lines(tmp_path / "p.jsonl", {"prompt": "one", "output_tokens": 4}, {"prompt": "two"})
    assert [each.output_tokens for each in made(prompts=named, requests=2, output_tokens=9)] == [4, 9]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no request"),
        ("{\n", ":1 is no JSON object"),
        ('{"timestamp": 1}\n', ":1 is no request of a trace"),
        ('{"t_s": "soon", "prompt_tokens": 1, "output_tokens": 1}', ":1 is no request of a trace"),
    ],
)
def test_a_trace_that_cannot_be_read_says_where(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(DataError, match=why):
        made(trace=str(tmp_path / "t.jsonl"))
    with pytest.raises(DataError, match="cannot read"):
        made(trace=str(tmp_path / "none.jsonl"))


def test_bodies_are_those_of_the_route() -> None:
    (request,) = made(requests=1, prompt_tokens=3, output_tokens=5)
    body = request.body(spec(body={"temperature": 0.5, "ignore_eos": False}))
    assert body["prompt"] == request.prompt and body["max_tokens"] == 5
    assert (body["temperature"], body["ignore_eos"], body["stream"]) == (0.5, False, True)
    chat = request.body(spec(api="chat", ignore_eos=False))
    assert len(chat["messages"][0]["content"].split()) == 3
    assert chat["max_completion_tokens"] == 5 and "ignore_eos" not in chat


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"rate": 1, "concurrency": 2}, "concurrency and rate exclude each other"),
        ({"poisson": True}, "poisson needs a rate"),
        ({"trace": "a", "prompts": "b"}, "exclude each other"),
        ({"prompt_tokens": "9:3"}, "a length is a number of tokens"),
        ({"base_url": "ftp://x"}, "base_url"),
        ({"slo": "speed=3"}, "is no objective"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        spec(**fields)


def test_objectives_have_units() -> None:
    assert spec(slo="ttft=300ms, tpot=.04,e2e=5s").slo == Slo(ttft_s=0.3, tpot_s=0.04, e2e_s=5.0)
    assert spec().slo.is_empty
