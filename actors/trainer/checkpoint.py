"""Save and load the sharded state by torch's distributed checkpoint (DCP): any number of ranks reads what any wrote."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from raytide.actors.trainer import manifest
from raytide.actors.trainer.group import Group
from raytide.actors.trainer.manifest import Checkpoint
from raytide.core.errors import CheckpointError, RaytideError, StorageError
from raytide.core.train_spec import TrainSpec

TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
"""Frozen weights come from where they came first."""


class Checkpoints:
    """The checkpoints of a run, as one generation of ranks sees them. All ranks call every method together."""

    def __init__(self, spec: TrainSpec, run_digest: str, dataset_digest: str, group: Group) -> None:
        self.root = Path(spec.out) / "checkpoints"
        self.spec, self.run_digest, self.dataset_digest, self.group = spec, run_digest, dataset_digest, group

    def save(self, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, step: int) -> Path:
        """Write all shards, then let rank 0 seal them. StorageError on a full disk, with nothing older touched."""
        written = self.group.from_first(manifest.part(self.root, step))
        try:
            (model,) = parts
            weights, moments = get_state_dict(model, optimizer, options=TRAINED)
            save({"model": weights, "optim": moments}, checkpoint_id=written, process_group=self.group.io)
        except CheckpointException as error:
            shutil.rmtree(written, ignore_errors=True)
            raise _explain(error, manifest.folder(self.root, step)) from error
        failed = self.group.from_first(self._seal(written, step) if self.group.is_first else None)
        if failed is not None:
            raise failed
        return manifest.folder(self.root, step)

    def load(self, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> tuple[int, list[CheckpointError]]:
        """Load the newest good checkpoint and return its step, or 0 when the run has none, and the ones passed over.

        CheckpointError when there are some and none is good, or when another run wrote them: starting over in silence
        would lose work.
        """
        found, failed = self.group.from_first(self._find() if self.group.is_first else (None, None))
        if failed is not None:
            raise failed
        assert found is not None
        if found.checkpoint is None:
            return 0, found.rejected
        (model,) = parts
        weights, moments = get_state_dict(model, optimizer, options=TRAINED)
        try:  # in place
            load({"model": weights, "optim": moments}, checkpoint_id=found.checkpoint.path, process_group=self.group.io)
        except CheckpointException as error:  # a BaseException: nothing above would catch it
            raise CheckpointError(
                f"cannot load {found.checkpoint.path}: {_first(error)}", hint="Go on with the spec that wrote it."
            ) from error
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=TRAINED)
        return found.checkpoint.manifest.step, found.rejected

    def _seal(self, written: Path, step: int) -> RaytideError | None:
        try:
            manifest.seal(
                written,
                self.root,
                step,
                samples=step * self.spec.global_batch,
                spec_digest=self.run_digest,
                dataset_digest=self.dataset_digest,
                world=self.group.world,
            )
            manifest.prune(self.root, self.spec.keep_checkpoints)
        except RaytideError as error:
            shutil.rmtree(written, ignore_errors=True)
            return error
        return None

    def _find(self) -> tuple[manifest.Found | None, CheckpointError | None]:
        found = manifest.latest(self.root)
        if found.checkpoint is None:
            return found, found.rejected[0] if found.rejected else None
        try:
            self._check(found.checkpoint)
        except CheckpointError as error:
            return None, error
        return found, None

    def _check(self, checkpoint: Checkpoint) -> None:
        for what, theirs, ours in (
            ("model, seed or batch", checkpoint.manifest.spec_digest, self.run_digest),
            ("dataset", checkpoint.manifest.dataset_digest, self.dataset_digest),
        ):
            if theirs != ours:
                raise CheckpointError(
                    f"{checkpoint.path} was written with another {what}.",
                    hint="Go on with the spec that wrote it, or choose another out directory.",
                )


def _explain(error: CheckpointException, path: Path) -> RaytideError:
    """The storage failure inside DCP's bundle, in the words of raytide's own tree."""
    for outermost, _ in error.failures.values():
        cause: BaseException | None = outermost
        while cause is not None:
            if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
                return StorageError(
                    f"no space left while writing {path}.",
                    hint="Free space there, then resume: what was written before is whole.",
                )
            cause = cause.__cause__ or cause.__context__
    return StorageError(f"cannot write {path}: {_first(error)}", hint="Check the path and its permissions.")


def _first(error: CheckpointException) -> BaseException:
    return next((cause for cause, _ in error.failures.values()), error)
