"""The command `compress`, which follows a recipe to make a model smaller, on this machine or in a job of the queue."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from raytide.cli.show import Json, as_json
from raytide.core.config import load_yaml


def compression(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file: model, steps, quality and out.")],
    json: Json = False,
) -> None:
    """Follow a recipe to make a model smaller: prune, distil, quantise.

    After an interruption, run the command again to continue. The exit code is 1 if the model does not pass the
    recipe's quality gate.
    """
    from raytide.pipelines.compress.chain import compress
    from raytide.pipelines.compress.recipe import CompressRecipe

    asked = CompressRecipe.parse(load_yaml(recipe), where=str(recipe))
    card = compress(asked, on_progress=_show_progress)
    if json:
        as_json(card.to_json())
    else:
        print(f"{asked.out}/model: {card.bytes / 1e6:,.1f} MB of {card.parent_bytes / 1e6:,.1f} MB")
        for name, value in (card.speed or {}).items():
            print(f"{name}: {value:,.1f} tokens/s")
        metrics = (card.quality or {}).get("metrics")
        for name in ("ppl_change", "kl", "kl_p99", "same_top1", "flips"):
            if isinstance(metrics, dict) and name in metrics:
                print(f"{name}: {metrics[name]:.4g}")
    if card.broken:
        sys.stderr.write("".join(f"gate: {each}\n" for each in card.broken))
        raise typer.Exit(1)


def _show_progress(what: str, done: int, of: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{what}: {done:,} of {of:,}" + ("\n" if done >= of else ""))
