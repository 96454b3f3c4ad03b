"""Prometheus' way through a live cluster: each page that the API lists answers, with what the catalogue declares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import raytide as rt
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.core.objects.endpoint import EndpointState, Replicas, ServeSpec
from raytide.core.telemetry.catalogue import METRICS

pytestmark = pytest.mark.cluster


@pytest.fixture
def endpoint(tide: rt.Client, tmp_path: Path, eventually: Callable[..., None]) -> Iterator[rt.EndpointHandle]:
    (tmp_path / "config.json").write_text("{}")
    engine = {"kind": "fake", "tokens_per_s": 200.0}
    spec = ServeSpec(
        name="seen",
        model=str(tmp_path),
        replicas=Replicas(min=1, max=1, slo_ttft_s=30.0),
        resources={"GPU": 8},
        engine=engine,
    )
    handle = tide.serve(spec)
    yield handle.wait(replicas=1, timeout_s=360.0)
    handle.delete()
    eventually(lambda: handle.refresh().status.endpoint.state is EndpointState.DELETED, within_s=60.0)


def test_every_page_that_is_listed_answers_and_together_they_show_a_request(
    live: LocalCluster, endpoint: rt.EndpointHandle, eventually: Callable[..., None]
) -> None:
    def pages() -> dict[str, list[str]]:
        """Returns the URLs by job."""
        found: dict[str, list[str]] = {}
        for group in httpx.get(f"{live.api_url}/v1/targets", timeout=60.0).raise_for_status().json():
            labels = group["labels"]
            found.setdefault(labels["job"], []).extend(
                f"http://{t}{labels['__metrics_path__']}" for t in group["targets"]
            )
        return found

    jobs = {"raytide-api", "raytide-gateway", "raytide-replica", "raytide-node", "raytide-gpu"}
    eventually(lambda: jobs <= pages().keys() and len(pages()["raytide-gateway"]) == 2)
    client = endpoint.openai(max_retries=0, timeout=60.0)
    client.completions.create(model="seen", prompt="x", max_tokens=5)

    shown: dict[str, set[str]] = {}
    of_nodes = {"raytide_node_clock_skew_seconds", "raytide_node_oom_kills", "raytide_audit_missing_entries"}

    def all_answer_and_show_it() -> bool:
        """Gateways count after they answered; nodes and a replica of an earlier test may be leaving."""
        nonlocal shown
        values, shown, silent = _scraped(pages())
        is_whole = silent <= {"raytide-node", "raytide-gpu"} and jobs <= shown.keys()
        return is_whole and _shows_a_request(values) and of_nodes <= shown["raytide-api"]

    eventually(all_answer_and_show_it)
    for job, names in shown.items():
        if job != "raytide-node":  # Ray's own
            assert {name for name in names if name.startswith(("raytide_", "DCGM_"))} <= METRICS.keys(), job
    assert "DCGM_FI_DEV_POWER_USAGE" in shown["raytide-gpu"]
    assert {"ray_node_mem_used", "ray_spill_manager_objects_bytes"} <= shown["raytide-node"]


def _shows_a_request(values: Mapping[tuple[str, str], float]) -> bool:
    exact = {
        ("raytide_requests_total", "raytide-gateway"),
        ("raytide_slo_requests_total", "raytide-gateway"),
        ("raytide_queue_seconds_count", "raytide-gateway"),
        ("raytide_replicas_ready", "raytide-api"),
    }
    tokens = {("raytide_tokens_total", "raytide-gateway"), ("raytide_generated_tokens_total", "raytide-replica")}
    return all(values.get(key) == 1 for key in exact) and all(values.get(key, 0.0) >= 5 for key in tokens)


def _scraped(pages: dict[str, list[str]]) -> tuple[dict[tuple[str, str], float], dict[str, set[str]], set[str]]:
    """Returns the sums of the endpoint's samples by name and job, the families that each job shows, and the jobs with
    a page that does not answer."""
    values: dict[tuple[str, str], float] = {}
    shown: dict[str, set[str]] = {}
    silent: set[str] = set()
    for job, urls in pages.items():
        for url in urls:
            try:
                text = httpx.get(url, timeout=60.0).raise_for_status().text
            except httpx.TransportError:
                silent.add(job)
                continue
            for family in text_string_to_metric_families(text):
                shown.setdefault(job, set()).add(family.name)
                for sample in family.samples:
                    if sample.labels.get("endpoint") == "seen":
                        values[sample.name, job] = values.get((sample.name, job), 0.0) + sample.value
    return values, shown, silent


def test_the_energy_of_a_node_reaches_the_ledger_and_the_report(
    tide: rt.Client, endpoint: rt.EndpointHandle, eventually: Callable[..., None]
) -> None:
    def is_booked() -> bool:
        table = tide.costs("job")
        return any(row.key == "seen" and row.kwh > 0 for row in table.rows) and table.co2_kg(table.kwh) > 0

    eventually(is_booked, within_s=120.0)
    assert "kWh" in tide.costs("job")._repr_html_()
