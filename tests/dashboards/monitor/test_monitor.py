"""The monitor: pages become history, rules become alerts, alerts act; all from real pages over HTTP."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.dashboards.alerts.test_actions import World

from raytide.core.telemetry.metrics import render
from raytide.core.telemetry.settings import AlertAction, NotifySection
from raytide.dashboards.alerts.notify.dispatch import Dispatcher
from raytide.dashboards.alerts.payload import alert_json
from raytide.dashboards.alerts.records import FILE, AlertRecords
from raytide.dashboards.alerts.runner import ActionRunner
from raytide.dashboards.history.reader import HistoryReader
from raytide.dashboards.history.writer import HistoryWriter
from raytide.dashboards.monitor.alerting import Alerting, StoredSeries
from raytide.dashboards.monitor.anomalies import Anomalies
from raytide.dashboards.monitor.monitor import Monitor
from raytide.dashboards.monitor.scraper import PREFIXES, RAY, PageReader, Scraper, targets_from_discovery
from raytide.dashboards.rules.alerts import ALERTS
from raytide.dashboards.rules.evaluation import evaluate

NOW_S = 1_700_000_000.0
GPU_RULES = [rule for rule in ALERTS if rule.name.startswith("Gpu")]
PAGE = """\
# HELP raytide_requests_total Requests
# TYPE raytide_requests_total counter
raytide_requests_total{endpoint="chat",code=""} 7
raytide_odd{text="a } b \\"c\\" \\\\ d\\n"} 1.5 1700000000000
# TYPE raytide_wait_seconds histogram
raytide_wait_seconds_bucket{le="0.1"} 3.0
raytide_wait_seconds_bucket{le="+Inf"} 4.0
raytide_wait_seconds_sum 0.5
raytide_up{job="job-7"} 1
raytide_nothing NaN
other_metric 3
# TYPE ray_memory_manager_worker_eviction_total counter
ray_memory_manager_worker_eviction_total{Component="raylet",Name="hog",SessionName="s",Type="Task",WorkerId=""} 1.0
ray_spill_manager_objects_bytes{Component="raylet",State="Spilled",WorkerId=""} 2e8
ray_spill_manager_objects{Component="raylet",State="Spilled",WorkerId=""} 11
"""


def test_a_page_is_read_with_its_labels_and_types(tmp_path: Path) -> None:
    history = HistoryWriter(tmp_path / "h", low_bytes=0)
    reader = PageReader(history, {"job": "raytide-api"})
    found = {(series.metric, series.labels): (value, series.is_counter) for series, value in reader.read(PAGE)}
    job = ("job", "raytide-api")
    assert found == {
        ("raytide_requests_total", (("endpoint", "chat"), job)): (7.0, True),
        ("raytide_odd", (job, ("text", 'a } b "c" \\ d\n'))): (1.5, False),
        ("raytide_wait_seconds_bucket", (job, ("le", "0.1"))): (3.0, True),
        ("raytide_wait_seconds_bucket", (job, ("le", "+Inf"))): (4.0, True),
        ("raytide_wait_seconds_sum", (job,)): (0.5, True),
        ("raytide_up", (("job", "job-7"),)): (1.0, False),
        ("ray_memory_manager_worker_eviction_total", (("Name", "hog"), ("Type", "Task"), job)): (1.0, True),
        ("ray_spill_manager_objects_bytes", (("State", "Spilled"), job)): (2e8, False),
    }
    again = [series for series, _ in reader.read(PAGE)]
    assert again == [history.series(s.metric, s.labels, s.is_counter) for s in again]


@given(st.lists(st.one_of(st.text(max_size=50), st.sampled_from(PAGE.split("\n"))), max_size=20))
def test_a_hostile_page_is_read_as_far_as_it_makes_sense(lines: list[str]) -> None:
    class Names:
        def series(self, metric: str, labels: object, is_counter: bool) -> tuple[str, object]:
            return metric, labels

    reader = PageReader(Names(), {})  # type: ignore[arg-type]
    for _ in range(2):
        for (metric, _labels), value in reader.read("\n".join(lines)):  # type: ignore[misc]
            assert metric.startswith(PREFIXES) or metric in RAY
            assert value == value


def test_malformed_discovery_has_no_targets() -> None:
    listed: list[Any] = [None, {}, {"targets": "x"}, {"targets": ["a:1"], "labels": []}, {"targets": ["b:2"]}]
    assert [target.url for target in targets_from_discovery(listed)] == ["http://a:1/metrics", "http://b:2/metrics"]
    assert targets_from_discovery({"targets": []}) == []


@contextmanager
def pages(answer: Callable[[str], bytes | None]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answer(self.path)
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, format: str, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Watched:
    """A monitor over pages that a test writes."""

    def __init__(self, folder: Path, world: World, *actions: dict[str, Any], for_s: float | None = None) -> None:
        self.folder, self.world = folder, world
        self.gpu, self.at_s = 0.0, NOW_S
        self.actions = [AlertAction.parse(each, where="test") for each in actions]
        self.address = ""
        self.is_up = True

    def page(self, path: str) -> bytes | None:
        if path == "/v1/targets":
            target = f'{{"targets": ["{self.address}"], "labels": {{"job": "raytide-gpu", "node": "node-1"}}}}'
            return f"[{target}]".encode()
        text = f'DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{gpu="0",Hostname="node-1"}} {self.gpu}\n'
        return text.encode() if self.is_up else None

    def watch(self, times: int, step_s: float = 15.0) -> None:
        """Watches with a monitor of its own, as one that was restarted does."""
        asyncio.run(self._watch(times, step_s))

    async def _watch(self, times: int, step_s: float) -> None:
        history = HistoryWriter(self.folder / "h", low_bytes=0)
        records = AlertRecords(self.folder / "alerts.sqlite")
        runner = ActionRunner(records, self.actions, lambda: self.world, {})
        reader = HistoryReader(self.folder / "h")
        alerting = Alerting(
            self.folder, GPU_RULES, records, runner, Dispatcher(records, [], NotifySection()), reader, 15.0
        )
        async with httpx.AsyncClient() as http:
            scraper = Scraper(http, history)
            api = f"http://{self.address}"
            anomalies = Anomalies(reader, 7.0, self.folder, lambda: self.at_s)
            monitor = Monitor(
                self.folder, api, 15.0, history, scraper, http, alerting, runner, anomalies, now_s=lambda: self.at_s
            )
            for _ in range(times):
                await monitor.watch_once()
                self.at_s += step_s
            self.text = render(await monitor._page({})).decode()
        history.close()

    def states(self) -> dict[str, str]:
        return {alert.name: str(alert.state) for alert in AlertRecords(self.folder / "alerts.sqlite").alerts()}


QUARANTINE = {"alert": "GpuEccUncorrectable", "do": "quarantine_node"}


def test_rising_ecc_errors_quarantine_the_node_once_though_the_monitor_restarts(tmp_path: Path) -> None:
    watched = Watched(tmp_path, World(), QUARANTINE)
    with pages(watched.page) as watched.address:
        watched.watch(4)
        assert watched.states() == {}
        watched.gpu = 3.0
        watched.watch(2)
        watched.watch(3)
    assert watched.states() == {"GpuEccUncorrectable": "firing"}
    assert list(watched.world.orders.values()) == ["quarantine_node node-1"]
    assert 'raytide_alerts{alert="GpuEccUncorrectable",severity="critical"} 1.0' in watched.text
    assert f'raytide_scrape_up{{instance="{watched.address}",job="raytide-gpu"}} 1.0' in watched.text


def test_the_first_action_that_fails_raises_the_counter_of_failures(tmp_path: Path) -> None:
    watched = Watched(tmp_path, World(), QUARANTINE)
    failed = 'raytide_actions_total{action="quarantine_node",outcome="failed"}'
    watched.world.is_away = True
    with pages(watched.page) as watched.address:
        watched.watch(4)
        assert f"{failed} 0.0" in watched.text.splitlines()
        watched.gpu = 3.0
        watched.watch(2)
        assert f"{failed} 1.0" in watched.text.splitlines()


def test_beside_an_alertmanager_the_own_evaluator_only_records(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text('{"monitoring": true}')
    watched = Watched(tmp_path, World(), QUARANTINE)
    with pages(watched.page) as watched.address:
        watched.watch(4)
        watched.gpu = 3.0
        watched.watch(4)
    assert watched.states() == {"GpuEccUncorrectable": "firing"}
    assert watched.world.orders == {}


def test_an_alert_that_another_process_writes_while_the_monitor_acts_is_acted_on_soon(tmp_path: Path) -> None:
    acted: list[float] = []

    class Acting:
        def __init__(self, again: Callable[[], object]) -> None:
            self.again = again

        def resume(self, now_s: float) -> None: ...

        def evaluate(self, now_s: float) -> None: ...

        def act(self, now_s: float) -> None:
            acted.append(now_s)
            if len(acted) == 1:
                (tmp_path / FILE).write_text("written meanwhile")
            else:
                self.again()

    async def watch() -> None:
        history, reader = HistoryWriter(tmp_path / "h", low_bytes=0), HistoryReader(tmp_path / "h")
        async with httpx.AsyncClient() as http:
            anomalies = Anomalies(reader, 7.0, tmp_path, lambda: NOW_S)
            again, loop = asyncio.Event(), asyncio.get_running_loop()
            stub = cast("Any", Acting(lambda: loop.call_soon_threadsafe(again.set)))
            scraper, hour_s = Scraper(http, history), 3600.0
            monitor = Monitor(tmp_path, "http://127.0.0.1:9", hour_s, history, scraper, http, stub, stub, anomalies)
            watching = asyncio.create_task(monitor.run())
            with suppress(TimeoutError):
                await asyncio.wait_for(again.wait(), 30)
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
        history.close()

    asyncio.run(watch())
    assert len(acted) >= 2


def test_a_page_that_is_gone_is_down_and_the_others_go_on(tmp_path: Path) -> None:
    watched = Watched(tmp_path, World())
    with pages(watched.page) as watched.address:
        watched.is_up = False
        watched.watch(1)
    source = HistoryReader(tmp_path / "h")
    ((labels, points),) = source.range("up", {}, 0, watched.at_s)
    assert dict(labels) == {"job": "raytide-gpu", "instance": watched.address, "node": "node-1"}
    assert points == [(NOW_S, 0.0)]


def test_a_ratio_to_zero_is_an_alert_that_json_can_hold(tmp_path: Path) -> None:
    history, reader = HistoryWriter(tmp_path / "h", low_bytes=0), HistoryReader(tmp_path / "h")
    requests = history.series("raytide_requests_total", (("endpoint", "chat"), ("outcome", "ok")), True)
    preemptions = history.series("raytide_preemptions_total", (("endpoint", "chat"), ("replica", "r1")), True)
    records = AlertRecords(tmp_path / FILE)
    rules = [rule for rule in ALERTS if rule.name == "PreemptionsHigh"]
    runner, dispatcher = ActionRunner(records, [], World, {}), Dispatcher(records, [], NotifySection())
    alerting = Alerting(tmp_path, rules, records, runner, dispatcher, reader, 15.0)
    for step in range(41):  # no request ends in ten minutes
        history.write(NOW_S + 15 * step, [(requests, 7.0), (preemptions, float(step))])
    alerting.evaluate(NOW_S + 600)
    history.close()
    (alert,) = records.alerts()
    assert (alert.state, alert.value) == ("pending", None)
    assert alert.summary == "chat preempts inf% of its requests for lack of KV blocks"
    json.dumps(alert_json(alert), allow_nan=False)


def test_each_day_counts_alike_in_an_average_over_a_week(tmp_path: Path) -> None:
    history, reader = HistoryWriter(tmp_path / "h", low_bytes=0), HistoryReader(tmp_path / "h")
    price = history.series("raytide_endpoint_usd_per_mtoken", (("endpoint", "chat"),), False)
    rises_s, end_s = 5 * 86_400, 7 * 86_400
    for after_s in (*range(0, rises_s, 600), *range(rises_s, end_s + 120, 120)):  # of the last days more is kept
        history.write(NOW_S + after_s, [(price, 1.0 if after_s < rises_s else 2.0)])
    (rule,) = [rule for rule in ALERTS if rule.name == "PricePerMTokRegressed"]
    found = evaluate(rule.expr, StoredSeries(reader, 300.0), NOW_S + end_s)
    history.close()
    assert found == {(("endpoint", "chat"),): pytest.approx(2.0 / (9.0 / 7.0), rel=0.02)}
