"""Chromium, driven by Playwright: it opens pages of this machine and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
AXE = Path(__file__).parents[1] / "dashboards" / "web" / "node_modules" / "axe-core" / "axe.min.js"
SIZES = {1280: 900, 390: 844}
MOST_WAIT_MS = 120_000
SHOW = """place => new Promise(shown => {
  if (location.hash === place) return shown();
  addEventListener("hashchange", () => setTimeout(shown), { once: true });
  location.hash = place;
})"""
"""Ends once the page has reacted to its new address, which is after the navigation has ended."""
TOKEN_KEY = "raytide.token"  # the name under which the page keeps it, no secret itself


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A browser for one module: while it is open an event loop runs, in which asynchronous tests cannot."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("Chromium is not installed: `./dev setup` says how")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=MOST_WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(OPTIONS), timeout=MOST_WAIT_MS)
        yield browser
        browser.close()


class Watched:
    """One tab, with everything that went wrong in it."""

    def __init__(self, page: Page, address: str, subtests: pytest.Subtests) -> None:
        self.page, self.address, self._subtests = page, address, subtests
        self.problems: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text}")

    def _request(self, request: Request) -> None:
        if not request.url.startswith(self.address):
            self.problems.append(f"a request to {request.url}")

    def open(self, place: str) -> Page:
        """Shows a page, and waits until it is live and nothing of it is still loading."""
        from playwright.sync_api import expect

        if self.page.url.startswith(f"{self.address}/"):
            self.page.evaluate(SHOW, f"#/{place}")
        else:
            self.page.goto(f"{self.address}/#/{place}")
        self.page.wait_for_selector(".link-state.live", timeout=180_000)
        expect(self.page.locator("main .skeleton")).to_have_count(0, timeout=180_000)
        return self.page

    def check_accessible(self, place: str) -> None:
        """Holds, in a test of its own, that axe-core finds nothing serious or critical. Without axe-core only that is
        skipped."""
        with self._subtests.test(f"axe-core: {place}"):
            if not AXE.is_file():
                pytest.skip("axe-core is missing: `./dev page` installs it")
            assert self._violations() == []

    def _violations(self) -> list[str]:
        self.page.evaluate(AXE.read_text())  # a script element would be against the page's own policy
        found: dict[str, Any] = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{each['id']}: {node['html'][:160]} {json.dumps(node['any'][:1])[:300]}"
            for each in found["violations"]
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"][:3]
        ]


Tab = Callable[..., Any]


@pytest.fixture
def tab(chromium: Browser, subtests: pytest.Subtests) -> Tab:
    """A tab at a width and in a theme, signed in with a token."""

    @contextmanager
    def opened(address: str, token: str, width: int = 1280, theme: str = "dark") -> Iterator[Watched]:
        context = chromium.new_context(
            viewport={"width": width, "height": SIZES[width]},
            color_scheme="dark" if theme == "dark" else "light",
        )
        context.set_default_timeout(MOST_WAIT_MS)
        if token:
            context.add_init_script(f"sessionStorage.setItem({json.dumps(TOKEN_KEY)}, {json.dumps(token)})")
        try:
            yield Watched(context.new_page(), address.rstrip("/"), subtests)
        finally:
            context.close()

    return opened
