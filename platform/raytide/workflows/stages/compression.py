"""The process of a compress stage: `python -m raytide.workflows.stages.compression RECIPE`, on a leased node.

After a restart the process continues where it stopped. The stage's metrics come from the model card: `bytes`,
`parent_bytes`, the metrics of the suite, and the measured speed.
"""

from __future__ import annotations

import json
import sys

from raytide.core.config import environment
from raytide.core.errors import RaytideError
from raytide.core.io.storage import join, write_bytes
from raytide.pipelines.compress.card import CompressionCard
from raytide.pipelines.compress.recipe import CompressRecipe
from raytide.workflows.stages.runner import METRICS_FILE


def metrics_of(card: CompressionCard) -> dict[str, float]:
    found = {"bytes": float(card.bytes), "parent_bytes": float(card.parent_bytes), **(card.speed or {})}
    measured = (card.quality or {}).get("metrics")
    return {**found, **measured} if isinstance(measured, dict) else found


def main(text: str) -> int:
    from raytide.pipelines.compress.chain import compress

    recipe = CompressRecipe.parse(json.loads(text), where="compress")
    try:
        card = compress(recipe, on_progress=_show)
        write_bytes(join(environment("STAGE_OUT") or ".", METRICS_FILE), json.dumps(metrics_of(card)).encode())
    except RaytideError as error:
        sys.stderr.write(f"{error.code}: {error}\n")
        return error.exit_code
    sys.stdout.write(f"{recipe.out}/model: {card.bytes:,} of {card.parent_bytes:,} bytes\n")
    if card.broken:
        sys.stderr.write(f"the gate is not passed: {'; '.join(card.broken)}.\n")
    return 1 if card.broken else 0


def _show(what: str, done: int, of: int) -> None:
    if done == of:
        sys.stdout.write(f"{what}: {of:,}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
