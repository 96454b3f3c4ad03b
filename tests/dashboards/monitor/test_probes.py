"""Probes: sent like a user's request, judged by what is expected, counted apart, shown by the API."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from raytide.actors.serving.openai_api.respond import PROBE
from raytide.core.errors import ConfigError
from raytide.core.telemetry.metrics import render
from raytide.core.telemetry.settings import MonitoringSection, ProbeSection
from raytide.dashboards.alerts.service import PROBES_FILE
from raytide.dashboards.monitor.probes import ProbeKey, Prober, ProbeResult

Answer = Callable[[httpx.Request], httpx.Response]


def probe(**fields: Any) -> ProbeSection:
    given = {"endpoint": "chat", "name": "tides", "prompt": "What causes tides?", "expect": "(?i)moon", **fields}
    return ProbeSection.parse(given, where="probe")


def chat(text: str | None) -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"message": {"content": text}, "text": text}]})


def send(folder: Path, section: ProbeSection, answer: Answer, key: str = "") -> tuple[ProbeResult, str]:
    async def run() -> tuple[ProbeResult, str]:
        probe_key = ProbeKey(folder, "default", is_needed=bool(key))
        probe_key._secret = key
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            prober = Prober([section], "http://gateway", http, probe_key, folder, lambda: 1000.0)
            result = await prober.send(section)
            return result, render(prober.samples()).decode()

    return asyncio.run(run())


def test_a_right_answer_is_measured_and_shown(tmp_path: Path) -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return chat("The Moon, mostly.")

    result, page = send(tmp_path, probe(), answer, key="rk-1")
    assert (result.success, result.right, result.answer) == (True, True, "The Moon, mostly.")
    (request,) = asked
    assert str(request.url) == "http://gateway/chat/v1/chat/completions"
    assert (request.headers[PROBE], request.headers["Authorization"]) == ("tides", "Bearer rk-1")
    assert json.loads(request.content)["temperature"] == 0
    assert 'raytide_probe_answer_right{endpoint="chat",probe="tides"} 1.0' in page
    assert 'raytide_probe_seconds_count{endpoint="chat",probe="tides"} 1.0' in page
    (shown,) = json.loads((tmp_path / PROBES_FILE).read_text())["probes"]
    assert (shown["endpoint"], shown["right"]) == ("chat", True)


@pytest.mark.parametrize(
    ("answer", "success", "error"),
    [
        (lambda _: chat("The wind."), True, ""),
        (lambda _: chat(None), True, ""),
        (lambda _: httpx.Response(503, text="no replica"), False, "503: no replica"),
        (lambda _: httpx.Response(200, text="<html>"), False, "Expecting value"),
        (lambda _: httpx.Response(200, json=[]), False, "list indices"),
        (lambda _: httpx.Response(200, content=b"x" * (2 << 20)), False, "larger than 1 MiB"),
    ],
)
def test_other_answers_are_wrong_or_none(tmp_path: Path, answer: Answer, success: bool, error: str) -> None:
    result, page = send(tmp_path, probe(), answer)
    assert (result.success, result.right) == (success, False)
    assert error in result.error
    assert f'raytide_probe_success{{endpoint="chat",probe="tides"}} {float(success)}' in page


def test_an_endpoint_that_hangs_is_given_up(tmp_path: Path) -> None:
    async def hang(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        raise AssertionError

    result, _ = send(tmp_path, probe(timeout_s=0.05, api="completions"), hang)  # type: ignore[arg-type]
    assert result.error == "no answer within 0.05 s"


@pytest.mark.parametrize(
    "probes",
    [
        [{"endpoint": "a", "prompt": "b"}] * 2,
        [{"endpoint": "a", "prompt": "b", "expect": "("}],
        [{"endpoint": "a", "promt": "b"}],
    ],
)
def test_probes_that_make_no_sense_are_refused(probes: list[dict[str, str]]) -> None:
    with pytest.raises(ConfigError):
        MonitoringSection.parse({"probes": probes}, where="monitoring")
