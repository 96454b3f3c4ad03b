"""Read every byte of checkpoints and say which are whole: what `raytide checkpoint verify` does. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raytide.actors.trainer.checkpoint import manifest
from raytide.actors.trainer.checkpoint.manifest import MANIFEST
from raytide.actors.trainer.checkpoint.storage import CheckpointStorage, named_failures, open_store
from raytide.core.errors import CheckpointError, NotFoundError


@dataclass(frozen=True, slots=True)
class VerifyResult:
    url: str
    step: int
    state: Literal["whole", "bad", "unfinished"]
    """Unfinished: being written, or a write that was cut off. Such a folder is never loaded, so it is no damage."""
    size: int = 0
    """Bytes that were read and hashed."""
    world: int = 0
    """Ranks that wrote it."""
    problems: tuple[str, ...] = ()


def verify(target: str) -> list[VerifyResult]:
    """Of a checkpoint, of a run or of a folder of checkpoints (a path or an fsspec URL), newest first.

    NotFoundError when there are none; StorageError when they cannot be reached.
    """
    target = target.rstrip("/")
    above, _, name = target.rpartition("/")
    if manifest.step_of(name) is not None:
        store = open_store(above or ".")
        if _sizes(store, name):
            return [_verdict(store, name)]
    for url in (target, f"{target}/checkpoints"):
        store = open_store(url)
        if names := manifest.folders_newest_first(store):
            return [_verdict(store, name) for name in names]
    raise NotFoundError(
        f"there is no checkpoint at {target}.", hint="Give a run's `out`, its checkpoints folder or one of them."
    )


def _verdict(store: CheckpointStorage, name: str) -> VerifyResult:
    url, step = f"{store.url}/{name}", manifest.step_of(name)
    assert step is not None
    if MANIFEST not in _sizes(store, name):
        return VerifyResult(url, step, "unfinished", problems=(f"it has no {MANIFEST}",))
    try:
        checkpoint = manifest.read(store, name)
    except CheckpointError as error:
        return VerifyResult(url, step, "bad", problems=(error.message,))
    problems = tuple(manifest.find_problems(store, checkpoint))
    return VerifyResult(url, step, "bad" if problems else "whole", checkpoint.size, checkpoint.manifest.world, problems)


def _sizes(store: CheckpointStorage, name: str) -> dict[str, int]:
    with named_failures(f"{store.url}/{name}"):
        return store.sizes(name)
