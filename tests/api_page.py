"""Writes the tables of docs/api.md from the public API: `python tests/api_page.py`. A test keeps them current."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import raytide as rt

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
MARK = "<!-- written by tests/api_page.py -->\n"

HANDLES = {
    "Run": ("refresh", "wait", "watch", "updates", "output", "logs", "why", "waits_for", "stop", "json"),
    "TrainRun": ("metrics", "table", "events", "plot", "profile", "result"),
    "FlowRun": ("stages", "stage", "graph", "resume"),
    "EndpointHandle": (
        "refresh",
        "wait",
        "watch",
        "updates",
        "bench",
        "openai",
        "logs",
        "report",
        "feedback",
        "rollout",
        "promote",
        "stop_rollout",
        "delete",
        "json",
    ),
}


def page() -> str:
    """Returns the page as it should be: its own text up to the mark, and the tables."""
    functions = [name for name in rt.__all__ if inspect.isfunction(_public(name))]
    lines = ["| call | |", "|---|---|"]
    for name in functions:
        method = getattr(rt.Client, name, None) or _public(name)
        lines.append(f"| `rt.{name}{_arguments(method)}` | {_first_sentence(method)} |")
    lines += ["", "| handle | methods |", "|---|---|"]
    for name, methods in HANDLES.items():
        own = _public(name)
        shown = ", ".join(f"`{method}{_arguments(getattr(own, method))}`" for method in methods)
        lines.append(f"| `{name}` | {shown} |")
    classes = [name for name in rt.__all__ if inspect.isclass(_public(name)) and name not in HANDLES]
    lines += ["", "Also: " + ", ".join(f"`rt.{name}`" for name in classes) + "."]
    return PAGE.read_text().partition(MARK)[0] + MARK + "\n" + "\n".join(lines) + "\n"


def _public(name: str) -> Any:
    return rt.__version__ if name == "__version__" else getattr(import_module(rt._HOME_OF[name]), name)


def _arguments(function: object) -> str:
    """The parameters without types; options that are typed in `raytide.sdk.options` are `**options`."""
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    shown = [
        str(each.replace(annotation=inspect.Parameter.empty)) for each in parameters if each.name not in ("self", "cls")
    ]
    keyword_only = next((i for i, each in enumerate(parameters) if each.kind is each.KEYWORD_ONLY), None)
    has_star = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    if keyword_only is not None and not has_star:
        shown.insert(keyword_only - ("self" in [each.name for each in parameters]), "*")
    return f"({', '.join(shown)})"


def _first_sentence(function: object) -> str:
    text = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.:;]) ", text)[0].rstrip(":;")


if __name__ == "__main__":
    PAGE.write_text(page())
