"""The page over a real cluster under load: every page works, and shows the numbers of the API."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from tests.actors.engine.tiny import save_llama
from tests.browser_fixture import Tab

import raytide as rt
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.control.client import ApiClient
from raytide.core.objects.endpoint import EndpointState, Replicas, ServeSpec
from raytide.core.specs.train import TrainSpec

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = [pytest.mark.cluster, pytest.mark.client, pytest.mark.timeout(600)]


@pytest.fixture
def endpoint(tide: rt.Client, tmp_path: Path, eventually: Callable[..., None]) -> Iterator[rt.EndpointHandle]:
    """One replica, which answers a stream of requests until the test ends."""
    save_llama(tmp_path / "model")
    spec = ServeSpec(
        name="watched",
        model=str(tmp_path / "model"),
        replicas=Replicas(min=1, max=1, slo_ttft_s=2.0),
        resources={"CPU": 1},
        engine={"kind": "fake", "tokens_per_s": 200.0},
    )
    handle = tide.serve(spec).wait(replicas=1, timeout_s=360.0)
    ended = threading.Event()

    def ask() -> None:
        client = handle.openai(max_retries=0, timeout=60.0)
        while not ended.is_set():
            with suppress(openai.APIError):  # the endpoint is deleted at the end
                client.completions.create(model="watched", prompt="def f(", max_tokens=40)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    yield handle
    ended.set()
    thread.join(timeout=60)
    handle.delete()
    eventually(lambda: handle.refresh().status.endpoint.state is EndpointState.DELETED, within_s=60.0)


def usd(micro: int) -> str:
    """Returns an amount as the page writes it."""
    amount = Decimal(micro) / 10**6
    digits = 0 if amount >= 1000 else 2 if amount >= 1 or amount == 0 else 3 if amount >= Decimal("0.01") else 4
    return f"${amount.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP):,}"


def row_of(page: Page, link: str) -> Locator:
    """Scrolls the page's table, of which only the rows in view exist, until the row with `link` is in view."""
    view, row = page.locator("[role=table]").first, page.locator(f"[role=row]:has(a:text-is('{link}'))")
    deadline = time.monotonic() + 180
    while not row.count():
        assert time.monotonic() < deadline, f"no row has {link}: {view.inner_text()}"
        view.evaluate(
            "view => { const end = view.scrollHeight - view.clientHeight;"
            " view.scrollTop = view.scrollTop >= end ? 0 : view.scrollTop + 200; }"
        )
        page.wait_for_timeout(100)
    return row


def test_every_page_shows_the_numbers_of_the_api(
    live: LocalCluster,
    tide: rt.Client,
    tab: Tab,
    endpoint: rt.EndpointHandle,
    train_spec: Callable[..., TrainSpec],
    eventually: Callable[..., None],
) -> None:
    run = tide.train(train_spec(steps=40, name="watched-run")).wait(timeout_s=360.0)
    access = ApiClient.from_run_dir(live.run_dir).access
    address, token = access["RAYTIDE_API"], access["RAYTIDE_TOKEN"]

    def api(path: str) -> Any:
        return httpx.get(f"{address}{path}", headers={"Authorization": f"Bearer {token}"}, timeout=60).json()

    with tab(address, token) as watched:

        def stat(label: str) -> str:
            """Returns the value of a number at the head of the page."""
            return str(watched.page.locator(f".stat:has(.label:text-is('{label}')) .value").first.inner_text())

        for place in ("now", "capacity", "queue", "runs", "endpoints", "endpoints/watched", "cost", "models", "alerts"):
            watched.open(place)
            watched.check_accessible(place)

        page = watched.open(f"runs/{run.id}")
        view = api(f"/v1/jobs/{run.id}")
        loss = view["job"]["progress"]["loss"]
        eventually(lambda: page.locator(".state").first.inner_text() == "succeeded")
        eventually(lambda: usd(api(f"/v1/jobs/{run.id}")["cost_micro_usd"]) in page.inner_text(".stats"), within_s=60.0)
        eventually(lambda: f"{loss:.3f}" in page.inner_text(".stats"))
        eventually(lambda: "step 40 of 40" in page.inner_text(".stats"))
        curves = api(f"/v1/jobs/{run.id}/metrics")
        assert curves["steps"][-1] == 40
        last = f"loss {curves['values']['loss'][-1]:.3f}"
        eventually(lambda: last in (page.locator(".chart").first.get_attribute("aria-label") or ""))

        page = watched.open("capacity")
        nodes = {node["id"] for node in api("/v1/status")["nodes"]}
        eventually(
            lambda: (
                {each["id"] for each in api("/v1/status")["nodes"]} == set(page.locator(".node b").all_inner_texts())
            )
        )
        assert nodes

        page = watched.open("endpoints/watched")
        eventually(
            lambda: float(page.locator(".stat:has-text('Requests') .value").first.inner_text().split("/")[0]) > 0
        )
        eventually(lambda: f"{api('/v1/endpoints/watched')['ready_replicas']} of" in stat("Replicas"))
        assert api("/v1/endpoints/watched")["base_url"] in page.inner_text("main")

        page = watched.open("cost")

        def cost() -> int:
            return int(next(row["amount_micro_usd"] for row in api("/v1/cost/job")["rows"] if row["key"] == run.id))

        page.click("button:text-is('Job or endpoint')")
        row = row_of(page, run.id)
        eventually(lambda: usd(cost()) in row.inner_text())
        row.locator("a").click()
        ledger = page.locator("[role=table][aria-label=Ledger]")
        ledger.wait_for()

        def shows_what_the_cost_is_made_of() -> bool:
            entries = api(f"/v1/ledger?subject={run.id}&limit=100")
            shown = ledger.get_attribute("aria-rowcount") == str(len(entries) + 1)
            return shown and sum(entry["amount_micro_usd"] for entry in entries) == cost()

        eventually(shows_what_the_cost_is_made_of)

        page = watched.open("queue")
        eventually(lambda: stat("Waiting").split()[0] == str(api("/v1/status")["jobs"].get("queued", 0)))
        assert watched.problems == []
