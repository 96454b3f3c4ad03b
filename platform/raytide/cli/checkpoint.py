"""checkpoint verify: is what a run wrote still what it wrote?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from raytide.cli.show import Json, as_json, as_table
from raytide.core.errors import CheckpointError

Target = Annotated[str, typer.Argument(help="A run, its checkpoints folder or one of them: a path or an fsspec URL.")]


def verify(target: Target, json: Json = False) -> None:
    """Read every byte and compare it with the manifests. Exit code 1 if any is bad or none is whole."""
    from raytide.actors.trainer.checkpoint.verify import verify as read_all

    verdicts = read_all(target)
    if json:
        as_json([asdict(verdict) for verdict in verdicts])
    else:
        rows = [(v.step, v.state, v.size, v.world or "-", v.url, "; ".join(v.problems) or "-") for v in verdicts]
        as_table(("STEP", "STATE", "BYTES", "RANKS", "WHERE", "WHY"), rows)
    bad = [verdict for verdict in verdicts if verdict.state == "bad"]
    if bad:
        raise CheckpointError(
            f"{len(bad)} of {len(verdicts)} checkpoints at {target} are bad.",
            hint="Delete them: a run passes them over.",
        )
    if not any(verdict.state == "whole" for verdict in verdicts):
        raise CheckpointError(f"no checkpoint at {target} is whole.", hint="The run has not finished its first save.")
