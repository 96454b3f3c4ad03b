"""Looks for intact checkpoints, as the trainer's tests check them."""

from __future__ import annotations

from dataclasses import dataclass, field

from raytide.actors.trainer.checkpoint import manifest
from raytide.actors.trainer.checkpoint.manifest import Checkpoint
from raytide.actors.trainer.checkpoint.storage import CheckpointStorage
from raytide.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest intact checkpoint, if any, and the errors of newer ones."""

    checkpoint: Checkpoint | None
    rejected: list[CheckpointError] = field(default_factory=list)


def latest(store: CheckpointStorage) -> Latest:
    """Returns the newest checkpoint that verifies, and the errors of bad ones."""
    rejected: list[CheckpointError] = []
    for name in manifest.folders_newest_first(store):
        try:
            return Latest(manifest.verify(store, name), rejected)
        except CheckpointError as error:
            rejected.append(error)
    return Latest(None, rejected)
