"""The commands `page`, which opens the web page, and `token`, which prints the API token that the page asks for."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from raytide.cli.show import ClusterName, Json, as_json, as_result
from raytide.control.client import ApiClient
from raytide.core.config import home

SIGN_IN = "page.html"
"""The file with which the browser opens the page. Only its owner can read it; a token in the browser's arguments could
be read by every user.
"""


def page(
    open_it: Annotated[bool, typer.Option("--open/--no-open", help="Open it in a browser, signed in.")] = True,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Show the address of the web page, and open it.

    Without a screen, it only prints the address. `raytide token` prints the token that the page asks for.
    """
    access = ApiClient.find(cluster).access
    address = access["RAYTIDE_API"].rstrip("/") + "/"
    if json:
        as_json({"page": address})
        return
    is_open = open_it and _has_screen() and _open(address, access["RAYTIDE_TOKEN"])
    print(f"the page is {'open: ' if is_open else ''}{address}")
    if not is_open:
        print("it asks for a token: `raytide token` prints yours")


def token(cluster: ClusterName = None, json: Json = False) -> None:
    """Print the API token, which the web page asks for."""
    access = ApiClient.find(cluster).access
    as_result({"address": access["RAYTIDE_API"], "token": access["RAYTIDE_TOKEN"]}, access["RAYTIDE_TOKEN"], json)


def _has_screen() -> bool:
    """Returns whether a graphical browser can open: without a display it would run in the terminal, or not at all."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _open(address: str, token: str) -> bool:
    target = f"{address}#token={quote(token, safe='')}"
    file = home() / SIGN_IN
    file.parent.mkdir(parents=True, exist_ok=True)
    _write_private(file, f'<!doctype html><meta charset="utf-8"><script>location.replace("{target}")</script>')
    return webbrowser.open(file.as_uri())


def _write_private(file: Path, text: str) -> None:
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as out:
        out.write(text)
