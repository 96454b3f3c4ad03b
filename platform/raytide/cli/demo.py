"""demo: the whole life of a model on this machine."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from raytide.cli.show import Json


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the endpoint up and print a curl line.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Where the dataset and the model go; a temporary folder when left out.")
    ] = None,
    json: Json = False,
) -> None:
    """The whole life of a model, on this machine.

    Build a dataset, train on spot nodes that are reclaimed, serve the model under load, show what it cost.
    """
    from raytide.demo import run

    for number in (signal.SIGTERM, signal.SIGHUP):  # as on Ctrl-C, the cluster is ended first
        signal.signal(number, _leave)
    raise typer.Exit(run(keep=keep, out=out, json=json))


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
