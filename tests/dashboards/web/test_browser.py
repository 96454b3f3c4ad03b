"""The page in a real browser, over a busy cluster that only exists in its records."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tests import browser_fixture
from tests.browser_fixture import Tab

from raytide.core.io.process import free_port

expect = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed").expect
pytestmark = [pytest.mark.client, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "page" / "busy_cluster.py"
TOKEN = "benchmark"
PLACES = (
    *("now", "capacity", "capacity/node-3", "queue", "runs", "runs/job-1", "runs?compare=job-1,job-2", "endpoints"),
    *("endpoints/chat-8b", "cost", "cost/job-1", "models", "models/chat-8b", "models?dataset=web-2026", "alerts"),
)


@pytest.fixture(scope="module")
def busy() -> Iterator[str]:
    """The address of an API with 60 jobs, 24 nodes and 6 endpoints."""
    command = [sys.executable, str(SCRIPT), "--jobs", "60", "--nodes", "24", "--endpoints", "6"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.match(r"(http://[\d.]+:\d+)/", process.stdout.readline())
        assert found is not None
        yield found[1]
    finally:
        process.terminate()
        process.wait(timeout=120)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("theme", ["dark", "light"])
def test_every_page_works_and_fits_and_can_be_used_by_everybody(busy: str, tab: Tab, width: int, theme: str) -> None:
    with tab(busy, TOKEN, width, theme) as watched:
        for place in PLACES:
            page = watched.open(place)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, place
            assert page.locator("h1").count() == 1
            without = page.locator(".stat:not(:has(.cmd)), .card:not(:has(.cmd))").all_inner_texts()
            assert without == [], "numbers without the command that prints them"
            watched.check_accessible(place)
        assert watched.problems == []


def test_without_axe_core_only_its_checks_are_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    skipped = list[str]()

    class Subtests:
        @contextmanager
        def test(self, msg: str) -> Iterator[None]:
            try:
                yield
            except pytest.skip.Exception as why:
                skipped.append(f"{msg}: {why}")

    monkeypatch.setattr(browser_fixture, "AXE", tmp_path / "axe.min.js")
    page = SimpleNamespace(on=lambda event, call: None)
    watched = browser_fixture.Watched(page, "http://x", Subtests())  # type: ignore[arg-type]
    try:
        for place in ("now", "cost"):
            watched.check_accessible(place)
    except pytest.skip.Exception as why:
        pytest.fail(f"the test itself is skipped: {why}")
    assert skipped == [f"axe-core: {place}: axe-core is missing: `./dev page` installs it" for place in ("now", "cost")]


def test_signing_in_asks_for_a_token_and_keeps_it_for_the_tab(busy: str, tab: Tab) -> None:
    with tab(busy, "") as watched:
        page = watched.page
        page.goto(f"{busy}/")
        assert "raytide token" in page.inner_text("form")
        watched.check_accessible("sign in")
        page.fill("#token", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("[role=alert]")
        page.fill("#token", TOKEN)
        page.keyboard.press("Enter")
        page.wait_for_selector(".link-state.live")
        page.reload()
        page.wait_for_selector(".link-state.live")
        assert page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 1]
        page.click("[aria-label='Sign out']")
        page.wait_for_selector("#token")
        assert page.evaluate("sessionStorage.length") == 0
    assert [each for each in watched.problems if "401" not in each] == []


def test_an_address_with_a_token_signs_in_and_forgets_it(busy: str, tab: Tab) -> None:
    with tab(busy, "") as watched:
        watched.page.goto(f"{busy}/#token={TOKEN}")
        watched.page.wait_for_selector(".link-state.live")
        assert TOKEN not in watched.page.url


def test_a_team_is_told_what_it_does_not_see(busy: str, tab: Tab) -> None:
    with tab(busy, "chat") as watched:
        page = watched.open("now")
        assert "sees team chat only" in page.inner_text(".who")
        page = watched.open("runs")
        jobs = httpx.get(f"{busy}/v1/jobs", headers={"Authorization": "Bearer chat"}, timeout=120).json()
        expect(page.locator("[role=table]")).to_have_attribute("aria-rowcount", str(len(jobs) + 1))
        page = watched.open("capacity")
        assert "A token for all teams shows them." in page.inner_text("main")
        assert watched.problems == []


def test_the_keyboard_is_enough(busy: str, tab: Tab) -> None:
    with tab(busy, TOKEN) as watched:
        page = watched.open("now")
        page.evaluate(
            "const now = Date.now(); Date.now = () => now"
        )  # on a busy machine, g and its letter lie far apart
        for keys, heading in (("gq", "Queue"), ("gr", "Runs"), ("ge", "Endpoints")):
            for key in keys:
                page.keyboard.press(key)
            expect(page.locator("h1")).to_have_text(heading)
        page.keyboard.press("?")
        page.wait_for_selector("[role=dialog]")
        page.keyboard.press("Escape")
        page.wait_for_selector("[role=dialog]", state="detached")
        page.keyboard.press("/")
        page.keyboard.type("job-3")
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile(r"#/runs/job-3"))
        page.keyboard.press("g")
        page.keyboard.press("q")
        expect(page.locator("h1")).to_have_text("Queue")  # the run's page has a table too
        page.wait_for_selector("[role=table] [tabindex='0'][role=row]")
        page.focus("[role=table] [tabindex='0'][role=row]")
        for row in range(3, 33):
            page.keyboard.press("ArrowDown")
            expect(page.locator(f"[aria-rowindex='{row}']")).to_be_focused()
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile(r"#/runs/job-"))
        assert watched.problems == []


def test_a_command_is_copied_and_shown(busy: str, tab: Tab) -> None:
    with tab(busy, TOKEN) as watched:
        page = watched.open("queue")
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.click("[aria-label='Copy the command: raytide quota']")
        expect(page.locator("[role=status].toast")).to_have_text("raytide quotacopied")
        assert page.evaluate("navigator.clipboard.readText()") == "raytide quota"


def test_each_page_shows_the_numbers_of_the_api(busy: str, tab: Tab) -> None:
    def api(path: str) -> Any:
        return httpx.get(f"{busy}/v1/{path}", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=120).json()

    status, endpoints, teams = api("status"), api("endpoints"), api("teams")
    nodes = [node for node in status["nodes"] if node["state"] != "ended"]
    gpus = sum({"h100x8": 8, "l4x4": 4}[node["type"].removesuffix(".spot")] for node in nodes)
    alerts = [each for each in api("alerts") if each["state"] != "resolved"]
    firing = [each for each in alerts if each["state"] == "firing"]
    ready, target = (
        sum(counted)
        for counted in zip(
            *((each["ready_replicas"], each["endpoint"]["target_replicas"]) for each in endpoints), strict=True
        )
    )
    budget_usd = sum(each["spec"]["budget"]["hard_usd"] or each["spec"]["budget"]["soft_usd"] for each in teams)
    spent_usd = sum(each["spent_micro_usd"] for each in teams) / 1e6
    price = f"${status['price_micro_usd_h'] / 1e6:.2f} /h"
    with tab(busy, TOKEN) as watched:
        page = watched.open("now")

        def stats() -> dict[str, str]:
            """Returns the numbers at the head of the page by their labels."""
            found = page.locator(".stat").all()
            return {
                each.locator(".label").inner_text().split("\n")[0]: each.locator(".value").inner_text()
                for each in found
            }

        assert stats()["GPUs in use"].endswith(f" of {gpus}")
        assert stats()["Spending"] == price
        assert stats()["Waiting"] == f"{status['jobs']['queued']} jobs"
        assert stats()["Alerts"] == f"{len(firing)} firing"
        watched.open("capacity")
        assert (stats()["Nodes"], stats()["GPUs"], stats()["Price"]) == (str(len(nodes)), str(gpus), price)
        assert page.locator(".node").count() == len(nodes)
        watched.open("queue")
        assert stats()["Waiting"] == f"{status['jobs']['queued']} jobs"
        shares = {
            row.split("\n")[0].split("\t")[0]: row for row in page.locator("table.plain tbody tr").all_inner_texts()
        }
        for each in teams:
            assert f"{each['use']['used']['GPU']:.0f} used" in shares[each["name"]]
        watched.open("endpoints")
        assert stats()["Replicas"] == f"{ready} of {target}"
        watched.open("cost")
        assert stats()["Budgets"] == f"{spent_usd / budget_usd:.0%}".replace("%", " %")
        watched.open("models")
        dataset = api("datasets/web-2026")
        row = page.locator("[role=row]:has-text('web-2026')").inner_text()
        assert f"{dataset['spec']['tokens'] / 1e9:.0f}G" in row and f"{dataset['spec']['documents'] / 1e6:.0f}M" in row
        watched.open("models?dataset=web-2026")
        lineage = page.locator(".lineage").inner_text()
        for model in api(f"datasets/web-2026/versions/{dataset['version']}/uses")["models"]:
            assert model in lineage
        watched.open("alerts")
        shown = page.locator(".list.states .strong").all_inner_texts()
        assert sorted(shown) == sorted(each["name"] for each in alerts)
        assert watched.problems == []


def test_long_tables_hold_few_rows_at_a_time(busy: str, tab: Tab) -> None:
    with tab(busy, TOKEN) as watched:
        page = watched.open("runs")
        expect(page.locator("[role=table]")).to_have_attribute("aria-rowcount", "61")
        assert 5 < page.locator("[role=table] .row").count() < 40


def test_long_lists_are_searched_by_words_with_the_keyboard_alone(busy: str, tab: Tab) -> None:
    def api(path: str) -> Any:
        return httpx.get(f"{busy}/v1/{path}", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=120).json()

    jobs = [f"{each['job']['id']} {each['job']['spec']['name']} {each['job']['spec']['team']}" for each in api("jobs")]
    wanted = [job for job in jobs if "dpo" in job and "search" in job]
    nodes = api("status")["nodes"]
    spot = [node for node in nodes if node["state"] != "ended" and "eu-1b" in str(node) and node["market"] == "spot"]
    assert 0 < len(wanted) < len(jobs) and 0 < len(spot) < len(nodes), "the cluster has some to find"
    with tab(busy, TOKEN) as watched:
        page = watched.open("runs")
        rows = page.locator("[role=table] .row")
        page.focus("[aria-label='Filter jobs']")
        page.keyboard.type("SEARCH dpo")
        expect(page.locator(".filter [role=status]")).to_have_text(f"{len(wanted)} of {len(jobs)}")
        expect(rows).to_have_count(len(wanted))
        assert all("dpo" in text and "search" in text for text in rows.all_inner_texts())
        watched.check_accessible("runs, filtered")
        page.keyboard.type(" nowhere")
        expect(page.locator(".table .empty")).to_have_text("Nothing matches “SEARCH dpo nowhere”")
        expect(rows).to_have_count(0)
        for _ in range(len("SEARCH dpo nowhere")):
            page.keyboard.press("Backspace")
        expect(page.locator("[role=table]")).to_have_attribute("aria-rowcount", str(len(jobs) + 1))
        page = watched.open("capacity")
        page.fill("[aria-label='Filter nodes']", "spot eu-1b")
        expect(page.locator(".node")).to_have_count(len(spot))
        for place, label in (("queue", "waiting jobs"), ("cost/job-1", "ledger"), ("capacity/node-3", "ledger")):
            watched.open(place)
            expect(page.get_by_role("searchbox", name=f"Filter {label}")).to_be_visible()
        watched.open("cost")
        expect(page.get_by_role("searchbox")).to_have_count(0)  # a few teams are found by eye
        page.click("button:text-is('Node')")
        page.get_by_role("searchbox", name="Filter cost by node").fill("node-1")
        expect(page.locator("[role=table] .row").first).to_contain_text("node-1")
        assert watched.problems == []


def test_a_dataset_says_why_its_uses_are_not_shown(busy: str, tab: Tab) -> None:
    with tab(busy, TOKEN) as watched:
        problem = {"error": {"code": "storage", "message": "the disk is full.", "hint": "Free some."}}
        watched.page.route("**/v1/datasets/*/versions/*/uses*", lambda route: route.fulfill(status=503, json=problem))
        page = watched.open("models?dataset=web-2026")
        expect(page.locator("[aria-label='Lineage of the newest version'] [role=alert]")).to_contain_text(
            "disk is full"
        )
        assert page.locator(".lineage").count() == 0, "half a line would look like all of it"
        watched.check_accessible("a dataset without its uses")
        assert [each for each in watched.problems if "503" not in each] == []


def test_an_earlier_fleet_is_replayed(busy: str, tab: Tab) -> None:
    with tab(busy, TOKEN) as watched:
        page = watched.open("capacity")
        page.fill("#replay", "-36000")
        page.wait_for_selector("h2:has-text('The fleet at')")
        page.wait_for_selector(".fleet .node")
        page.click("button:has-text('back to now')")
        page.wait_for_selector("h2:text-is('The fleet')")
        assert watched.problems == []


HELD_STREAM = """const real = fetch;
fetch = async (path, options) => {
  const response = await real(path, options);
  if (path !== "/v1/stream") return response;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const encoder = new TextEncoder();
  return new Response(new ReadableStream({
    async start(page) {
      window.tell = (message) => page.enqueue(encoder.encode(message));
      for (let seen = ""; !/event: status\\n.*\\n\\n/.test(seen); ) {
        const { value } = await reader.read();
        window.told = seen += value;
        tell(value);
      }
    },
  }));
};"""
"""Passes the first picture of the stream on, and then only what the test tells."""


def test_a_run_that_leaves_the_stream_is_asked_for(busy: str, tab: Tab) -> None:
    views = httpx.get(f"{busy}/v1/jobs", headers={"Authorization": f"Bearer {TOKEN}"}).json()
    job = next(view["job"] for view in views if view["job"]["state"] == "running")
    with tab(busy, TOKEN) as watched:
        watched.page.add_init_script(HELD_STREAM)
        page = watched.open(f"runs/{job['id']}")
        page.wait_for_selector(".stats.five")
        with page.expect_response(f"**/v1/jobs/{job['id']}", timeout=10_000):
            change = json.dumps({"rows": {}, "gone": [job["id"]]})
            page.evaluate("message => tell(message)", f"event: jobs\ndata: {change}\n\n")
        expect(page.locator("main .skeleton")).to_have_count(0)
        expect(page.locator("h1")).to_have_text(job["spec"]["name"])


def test_the_decisions_stay_in_place_when_a_new_plan_adds_one(busy: str, tab: Tab) -> None:
    with tab(busy, TOKEN) as watched:
        watched.page.add_init_script(HELD_STREAM)
        page = watched.open("capacity")
        page.wait_for_selector("ol[aria-label=Decisions]")
        status = json.loads(re.findall(r"event: status\ndata: (.*)\n", page.evaluate("told"))[-1])
        page.evaluate("document.querySelector('ol[aria-label=Decisions]').isFirst = true")
        with page.expect_response("**/v1/plans*", timeout=10_000):
            changed = json.dumps({**status, "plan": status["plan"] + 1})
            page.evaluate("message => tell(message)", f"event: status\ndata: {changed}\n\n")
        page.wait_for_timeout(200)
        assert page.evaluate("document.querySelector('ol[aria-label=Decisions]')?.isFirst")


def test_the_page_comes_back_after_the_api_was_away(tab: Tab) -> None:
    sizes = ["--jobs", "20", "--nodes", "12", "--endpoints", "2"]
    command = [sys.executable, str(SCRIPT), *sizes, "--port", str(free_port())]  # nobody else takes it meanwhile
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        address = first.stdout.readline().partition("/ ")[0]
        with tab(address, TOKEN) as watched:
            page = watched.open("now")
            first.kill()
            first.wait(timeout=120)
            page.wait_for_selector(".notice.bad")
            first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            page.wait_for_selector(".notice.bad", state="detached")
            page.wait_for_selector(".link-state.live")
    finally:
        first.kill()
        first.wait(timeout=120)
