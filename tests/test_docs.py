"""All that the documents point at is there."""

import re
import tomllib
from pathlib import Path

import pytest
import typer
from tests import api_page
from typer.core import TyperGroup

from raytide.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
ELSEWHERE = ("http://", "https://", "mailto:")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(document: Path) -> set[str]:
    """The ids that headings get: lower case, hyphens for spaces, punctuation dropped."""
    headings = re.findall(r"^#+ +(.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_relative_link_resolves(document: Path) -> None:
    broken = []
    for match in LINK.finditer(document.read_text(encoding="utf-8")):
        link = match.group(1) or match.group(2)
        if link.startswith(ELSEWHERE):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        is_inside = target.is_relative_to(ROOT)
        if (
            not is_inside
            or not target.exists()
            or (anchor and target.suffix == ".md" and anchor not in anchors(target))
        ):
            broken.append(link)
    assert broken == []


def test_the_map_tells_each_life_in_at_most_ten_steps() -> None:
    chapters = re.split(r"^## ", (ROOT / "docs" / "map.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    lives = {chapter.partition("\n")[0]: chapter for chapter in chapters if chapter.startswith("The life of")}
    assert set(lives) == {f"The life of a {noun}" for noun in ("job", "request", "token", "dollar")}
    for title, chapter in lives.items():
        steps = re.findall(r"^\d+\. .*(?:\n   .*)*", chapter, re.MULTILINE)
        assert 0 < len(steps) <= 10, title
        assert all("](" in step for step in steps), f"{title}: a step without a link"


def test_the_api_page_shows_the_api_as_it_is() -> None:
    assert api_page.PAGE.read_text() == api_page.page(), "`python tests/api_page.py` writes it anew"


def test_the_commands_of_the_readme_exist() -> None:
    used = set(re.findall(r"^\./dev (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    known = set(re.findall(r"^  (\w+)\)", (ROOT / "dev").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"demo", "test"} <= used <= known | {"setup", "fmt", "check", "test", "soak", "bench", "demo", "clean"}


def test_every_command_that_a_hint_or_a_page_names_exists() -> None:
    folders = ("actors", "autoscaler", "dashboards", "kernels", "pipelines", "platform")
    sources = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    named = re.compile(r"`raytide ([a-z][a-z-]*)(?: ([a-z][a-z-]*)(?=[` ]))?")
    wrong = [
        f"{name_of(file)}: raytide {match[1]} {match[2] or ''}"
        for file in [*DOCUMENTS, *sources]
        for match in named.finditer(file.read_text(encoding="utf-8"))
        if not is_command(match[1], match[2])
    ]
    assert wrong == []


def is_command(name: str, subcommand: str | None) -> bool:
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    command = root.get_command(typer.Context(root), name)
    if isinstance(command, TyperGroup) and subcommand is not None:
        command = command.get_command(typer.Context(command), subcommand)
    return command is not None


def test_every_ignored_rule_says_why() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    ignored = tomllib.loads(text)["tool"]["ruff"]["lint"]["ignore"]
    assert [rule for rule in ignored if not re.search(rf'"{rule}",? +# \S', text)] == []
