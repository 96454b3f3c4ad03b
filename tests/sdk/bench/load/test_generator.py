"""Loads on a server whose answers are known, and on one that misbehaves."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import uvloop
from starlette.responses import JSONResponse, Response, StreamingResponse
from tests.sdk.bench.load.conftest import Server, event

from raytide.core.errors import EngineError
from raytide.sdk.bench import BenchReport, BenchSpec, LoadGenerator
from raytide.sdk.bench.load.generator import BenchProgress

WARM_UP = 3


def load(server: Server, *, key: str = "", **fields: Any) -> BenchReport:
    small = {"prompt_tokens": 5, "output_tokens": 4, "warmup": WARM_UP}
    spec = BenchSpec.parse({"base_url": server.url, "model": "m", **small, **fields}, where="bench")
    return LoadGenerator(spec, api_key=key).run()


def test_a_closed_loop_keeps_that_many_requests_open(server: Server) -> None:
    report = load(server, concurrency=4, requests=25, key="rk-1")
    assert (report.sent, report.answered, report.errors, report.unfinished) == (25, 25, {}, 0)
    assert len(server.bodies) == 25 + WARM_UP, "the warm-up is no part of the report"
    assert server.most_open <= 4 and report.most_in_flight <= 4
    assert (report.prompt_tokens, report.cached_tokens, report.output_tokens) == (125, 25, 100)
    assert (report.ttft_s.n, report.itl_s.n, report.tpot_s.n, report.e2e_s.n) == (25, 75, 25, 25)
    assert report.output_tokens_per_s * report.duration_s == pytest.approx(100)
    assert set(server.keys) == {"Bearer rk-1"}


def test_an_open_loop_sends_whatever_is_open(server: Server) -> None:
    server.holds = threading.Event()
    spec = BenchSpec(base_url=server.url, model="m", rate=100.0, requests=8, prompt_tokens=(2, 2), warmup=0)

    def all_at_once(_: BenchProgress) -> None:
        if server.open == 8 and server.holds is not None:  # a request that is sent may not have arrived
            server.holds.set()

    report = LoadGenerator(spec).run(all_at_once)
    assert (report.answered, report.most_in_flight, server.most_open) == (8, 8, 8)
    assert [record.due_s for record in report.records] == pytest.approx([n / 100 for n in range(8)])
    assert all(record.sent_s > record.due_s - 0.005 for record in report.records)  # timers count in milliseconds
    assert report.generator.sent_late.n == 8 and report.generator.loop_late.n > 0


def test_every_failure_has_a_code(server: Server) -> None:
    replies = iter(
        [
            JSONResponse({"error": {"code": "rate_limit_exceeded", "type": "requests"}}, 429),
            Response("busy", 503),
            StreamingResponse(iter([event({"error": {"type": "server_error"}}), b"data: [DONE]\n\n"])),
            StreamingResponse(iter([event({"choices": [{"text": "a"}]})])),
            StreamingResponse(iter([b"data: {nonsense\n\n"])),
        ]
    )
    server.reply = lambda body: next(replies, None)
    report = load(server, concurrency=1, requests=7, warmup=0)
    assert report.errors == {
        "429 rate_limit_exceeded": 1,
        "503": 1,
        "stream server_error": 1,
        "incomplete": 1,
        "malformed": 1,
    }
    assert (report.answered, report.ttft_s.n) == (2, 2)
    assert report.output_tokens == 2 * 4 + 1


def test_a_server_that_does_not_count_has_its_events_counted(server: Server) -> None:
    chunks = [event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})]
    chunks += [b'data: {"choices": [{"delta": {"content": "a"}}]}\r\n\r\n'] * 3
    chunks += [event({"choices": [{"delta": {}, "finish_reason": "stop"}]}), b": a comment\n\n", b"data: [DONE]\n\n"]
    server.reply = lambda body: StreamingResponse(iter(chunks))
    report = load(server, requests=2)
    assert (report.output_tokens, report.itl_s.n, report.ttft_s.n) == (6, 4, 2)


def test_a_slow_answer_has_timed_out(server: Server) -> None:
    server.holds = threading.Event()
    assert load(server, requests=2, warmup=0, timeout_s=0.2).errors == {"timeout": 2}
    server.holds.set()


def test_a_server_that_answers_nothing_is_an_error(server: Server) -> None:
    server.reply = lambda body: Response(status_code=404)
    with pytest.raises(EngineError, match=r"answered none of 3 requests: 404"):
        load(server)
    with pytest.raises(EngineError, match="connection"):
        load(Server("http://127.0.0.1:9/v1"))


def test_goodput_counts_what_kept_the_whole_slo(server: Server) -> None:
    assert load(server, requests=6, slo="ttft=60s,tpot=60s,e2e=60s").good_requests == 6
    report = load(server, requests=6, slo="e2e=1us")
    assert (report.good_requests, report.goodput_per_s) == (0, 0.0)


def test_an_interrupt_reports_what_there_is(server: Server) -> None:
    def interrupted(progress: BenchProgress) -> None:
        if progress.ended >= 2:
            server.holds = threading.Event()
        if server.holds is not None and progress.sent > progress.ended:
            raise KeyboardInterrupt

    spec = BenchSpec(base_url=server.url, model="m", concurrency=2, requests=10**6, output_tokens=(3, 3), warmup=0)
    report = LoadGenerator(spec).run(interrupted)
    assert report.is_interrupted
    assert report.answered >= 2
    assert report.answered + report.unfinished == report.sent
    assert sum(report.errors.values()) == 0


def test_an_interrupt_before_the_load_begins_sends_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = BenchSpec(base_url=server.url, model="m", concurrency=2, requests=10**6, output_tokens=(3, 3), warmup=0)
    generator, run = LoadGenerator(spec), uvloop.run

    def run_late(work: Any) -> None:
        while not generator._is_interrupted:
            time.sleep(0.01)
        run(work)

    def interrupted(_: BenchProgress) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(uvloop, "run", run_late)
    report = generator.run(interrupted)
    assert report.is_interrupted
    assert (report.sent, server.bodies) == (0, [])


def test_an_interrupt_as_the_load_ends_reports_all_of_it(server: Server) -> None:
    holds = server.holds = threading.Event()

    def interrupted(_: BenchProgress) -> None:
        holds.set()
        for thread in threading.enumerate():
            if thread.name == "raytide-bench":
                thread.join()
        raise KeyboardInterrupt

    spec = BenchSpec(base_url=server.url, model="m", requests=3, output_tokens=(3, 3), warmup=0)
    report = LoadGenerator(spec).run(interrupted)
    assert report.is_interrupted
    assert report.answered == 3


def test_the_records_are_a_trace_of_the_same_load(server: Server, tmp_path: Path) -> None:
    report = load(server, rate=50.0, requests=5, prompt_tokens="2:9")
    report.write_records(tmp_path / "load.jsonl")
    again = load(server, trace=str(tmp_path / "load.jsonl"))
    assert [each.prompt_tokens for each in again.records] == [each.prompt_tokens for each in report.records]
    assert [each.output_tokens for each in again.records] == [4] * 5


def test_json_and_pictures_have_everything(server: Server, tmp_path: Path) -> None:
    report = load(server, requests=12, slo="ttft=1s")
    body = json.loads(json.dumps(report.json()))
    assert body["ttft_s"]["n"] == 12 and body["ttft_s"]["p99"] is None
    assert body["spec"]["slo"]["ttft_s"] == 1.0
    assert body["generator"]["loop_late"]["n"] >= 0
    for suffix, start in (("svg", b"<svg "), ("html", b"<!doctype html>"), ("png", b"\x89PNG")):
        assert report.plot().save(tmp_path / f"load.{suffix}").read_bytes().startswith(start)
