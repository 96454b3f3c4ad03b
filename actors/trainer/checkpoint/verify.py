"""Verifies every byte of checkpoints, for the command `raytide checkpoint verify`. This module does not import
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raytide.actors.trainer.checkpoint import manifest
from raytide.actors.trainer.checkpoint.manifest import MANIFEST
from raytide.actors.trainer.checkpoint.storage import CheckpointStorage, open_store
from raytide.core.errors import CheckpointError, NotFoundError


@dataclass(frozen=True, slots=True)
class VerifyResult:
    url: str
    step: int
    state: Literal["whole", "bad", "unfinished"]
    """Unfinished: in progress or interrupted. Such a folder is never loaded."""
    size: int = 0
    """The size of the checkpoint's files in bytes, according to its manifest."""
    world: int = 0
    """The number of ranks that wrote the checkpoint."""
    problems: tuple[str, ...] = ()


def verify(target: str) -> list[VerifyResult]:
    """Verifies one checkpoint, or all checkpoints of a run or a folder, newest first. `target` is a path or an fsspec
    URL.

    Raises NotFoundError if there are no checkpoints, and StorageError if the storage cannot be reached.
    """
    target = target.rstrip("/")
    parent, _, name = target.rpartition("/")
    if manifest.step_of(name) is not None:
        store = open_store(parent or ".")
        if manifest.sizes_of(store, name):
            return [_verify_folder(store, name)]
    for url in (target, f"{target}/checkpoints"):
        store = open_store(url)
        if names := manifest.folders_newest_first(store):
            return [_verify_folder(store, name) for name in names]
    raise NotFoundError(
        f"there is no checkpoint at {target}.", hint="Give a run's `out`, its checkpoints folder or one of them."
    )


def _verify_folder(store: CheckpointStorage, name: str) -> VerifyResult:
    url, step = f"{store.url}/{name}", manifest.step_of(name)
    assert step is not None
    if MANIFEST not in manifest.sizes_of(store, name):
        return VerifyResult(url, step, "unfinished", problems=(f"it has no {MANIFEST}",))
    try:
        checkpoint = manifest.read(store, name)
    except CheckpointError as error:
        return VerifyResult(url, step, "bad", problems=(error.message,))
    problems = tuple(manifest.find_problems(store, checkpoint))
    return VerifyResult(url, step, "bad" if problems else "whole", checkpoint.size, checkpoint.manifest.world, problems)
