"""The page in a real browser, over a busy cluster that only exists in its records."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from tests import browser_fixture
from tests.browser_fixture import Tab

expect = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed").expect
pytestmark = [pytest.mark.client, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "page" / "busy_cluster.py"
TOKEN = "benchmark"
PLACES = (
    *("now", "capacity", "capacity/node-3", "queue", "runs", "runs/job-1", "runs?compare=job-1,job-2", "endpoints"),
    *("endpoints/chat-8b", "cost", "cost/job-1", "models", "models/chat-8b", "alerts"),
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
        process.wait(timeout=30)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("theme", ["dark", "light"])
def test_every_page_works_and_fits_and_can_be_used_by_everybody(busy: str, tab: Tab, width: int, theme: str) -> None:
    with tab(busy, TOKEN, width, theme) as watched:
        for place in PLACES:
            page = watched.open(place)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, place
            assert page.locator("h1").count() == 1
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
        jobs = httpx.get(f"{busy}/v1/jobs", headers={"Authorization": "Bearer chat"}, timeout=30).json()
        assert page.locator("[role=table]").get_attribute("aria-rowcount") == str(len(jobs) + 1)
        page = watched.open("capacity")
        assert "A token for all teams shows them." in page.inner_text("main")
        assert watched.problems == []


def test_the_keyboard_is_enough(busy: str, tab: Tab) -> None:
    with tab(busy, TOKEN) as watched:
        page = watched.open("now")
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


def test_long_tables_hold_few_rows_at_a_time(busy: str, tab: Tab) -> None:
    with tab(busy, TOKEN) as watched:
        page = watched.open("runs")
        assert page.locator("[role=table]").get_attribute("aria-rowcount") == "61"
        assert 5 < page.locator("[role=table] .row").count() < 40


def test_an_earlier_fleet_is_replayed(busy: str, tab: Tab) -> None:
    with tab(busy, TOKEN) as watched:
        page = watched.open("capacity")
        page.fill("#replay", "-36000")
        page.wait_for_selector("h2:has-text('The fleet at')")
        page.wait_for_selector(".fleet .node")
        page.click("button:has-text('back to now')")
        page.wait_for_selector("h2:text-is('The fleet')")
        assert watched.problems == []


def test_the_page_comes_back_after_the_api_was_away(tab: Tab) -> None:
    command = [sys.executable, str(SCRIPT), "--jobs", "20", "--nodes", "12", "--endpoints", "2"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        address = first.stdout.readline().partition("/ ")[0]
        with tab(address, TOKEN) as watched:
            page = watched.open("now")
            first.kill()
            first.wait(timeout=30)
            page.wait_for_selector(".notice.bad", timeout=30_000)
            first = subprocess.Popen(
                [*command, "--port", address.rpartition(":")[2]], stdout=subprocess.PIPE, text=True
            )
            page.wait_for_selector(".notice.bad", state="detached", timeout=60_000)
            page.wait_for_selector(".link-state.live", timeout=30_000)
    finally:
        first.kill()
        first.wait(timeout=30)
