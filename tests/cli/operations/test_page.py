"""From the terminal to the page; and every command that the page shows is one of the terminal."""

from __future__ import annotations

import re
import stat
import webbrowser
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from raytide.cli.app import COMMANDS, app
from raytide.cli.operations import page
from raytide.dashboards.web import bundle

runner = CliRunner()
SECRET = "a/secret+token"
SOURCE = Path(bundle.__file__).parent / "src"


@pytest.fixture(autouse=True)
def access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYTIDE_API", "http://127.0.0.1:7400")
    monkeypatch.setenv("RAYTIDE_TOKEN", SECRET)
    monkeypatch.setenv("RAYTIDE_HOME", str(tmp_path / "home"))
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)


def test_the_token_is_printed_alone() -> None:
    assert runner.invoke(app, ["token"]).stdout == f"{SECRET}\n"


def test_without_a_screen_the_address_is_printed_and_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda url: pytest.fail(url))
    monkeypatch.setattr(page.sys, "platform", "linux")  # type: ignore[attr-defined]
    printed = runner.invoke(app, ["page"]).stdout
    assert "http://127.0.0.1:7400/" in printed and "raytide token" in printed
    assert SECRET not in printed


def test_a_browser_is_signed_in_by_a_file_that_only_its_owner_can_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[str] = []
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    for _ in range(2):
        assert "the page is open" in runner.invoke(app, ["page"]).stdout
    file = tmp_path / "home" / page.SIGN_IN
    assert opened == [file.as_uri()] * 2
    assert SECRET not in opened[0]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "http://127.0.0.1:7400/#token=a%2Fsecret%2Btoken" in file.read_text()


def test_the_page_shows_commands_that_exist() -> None:
    shown = {
        tuple(words.split())
        for file in SOURCE.rglob("*.tsx")
        for words in re.findall(r"[\"`>]raytide ([a-z-]+(?: [a-z-]+)?)", file.read_text())
    }
    assert len(shown) > 20
    root = typer.main.get_command(app)
    for name, *rest in shown:
        assert name in COMMANDS, name
        command = root.get_command(typer.Context(root), name)  # type: ignore[attr-defined]
        if rest and hasattr(command, "commands"):
            assert rest[0] in command.commands, (name, *rest)
