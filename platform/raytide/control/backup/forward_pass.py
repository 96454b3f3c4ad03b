"""Runs one forward pass of a model directory: `python -m raytide.control.backup.forward_pass DIR`. The exit code is 1
if the pass fails."""

from __future__ import annotations

import sys


def main(directory: str) -> None:
    import torch

    from raytide.actors.engine import LLM
    from raytide.core.errors import ScriptError

    logits = LLM(directory).logits([1, 2, 3])
    if not bool(torch.isfinite(logits).all()):
        raise ScriptError(f"{directory} predicts values that are not finite.")


if __name__ == "__main__":
    main(sys.argv[1])
