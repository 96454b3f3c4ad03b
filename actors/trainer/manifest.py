"""A checkpoint as files: a folder `step-00000050` whose manifest names and hashes all of them.

A folder is written under a hidden name and renamed when it is whole, so a name that can be seen is a finished
checkpoint; the hashes find what changed afterwards. No torch here: `raytide checkpoint verify` reads this.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field

from raytide.core.config import Config
from raytide.core.errors import CheckpointError, ConfigError
from raytide.core.storage import full_disk_is_an_error

MANIFEST = "manifest.json"
_PREFIX = "step-"
_CHUNK = 1 << 20
_RESTORE = "Delete the folder: the run goes on from the checkpoint before it."


class Manifest(Config):
    step: int = Field(ge=0)
    """Steps done; the next one to run has this number."""
    samples: int = Field(ge=0)
    """Sequences consumed. With the spec's seed it is the whole state of the data."""
    spec_digest: str
    dataset_digest: str
    world: int = Field(ge=1)
    """Ranks that wrote it; any number may read it."""
    files: dict[str, str]
    """SHA-256 by path inside the folder."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Found:
    """The newest good checkpoint, if there is one, and why newer ones were passed over."""

    checkpoint: Checkpoint | None
    rejected: list[CheckpointError] = field(default_factory=list)


def folder(root: Path, step: int) -> Path:
    return root / f"{_PREFIX}{step:08d}"


def part(root: Path, step: int) -> Path:
    """A name to write under; never used twice, so that a straggler of an earlier attempt cannot touch this one."""
    return root / f".{_PREFIX}{step:08d}.{uuid.uuid4().hex[:8]}.part"


def seal(
    written: Path, root: Path, step: int, *, samples: int, spec_digest: str, dataset_digest: str, world: int
) -> Checkpoint:
    """Hash what was written, add the manifest, make it durable and give it its name."""
    manifest = Manifest(
        step=step,
        samples=samples,
        spec_digest=spec_digest,
        dataset_digest=dataset_digest,
        world=world,
        files={file.relative_to(written).as_posix(): _sha256(file) for file in _files(written)},
    )
    final = folder(root, step)
    with full_disk_is_an_error(str(final)):
        body = manifest.model_dump()
        with open(written / MANIFEST, "w") as file:
            json.dump({**body, "sha256": _digest(body)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if final.exists():  # only one that `latest` rejected: the run got here again
            final.rename(part(root, step))
        written.rename(final)
        _sync_dir(root)
    return Checkpoint(final, manifest)


def verify(path: Path) -> Checkpoint:
    """The checkpoint at `path`, every byte checked; CheckpointError names the first file that is wrong."""
    manifest = _read(path)
    for name, digest in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing from its checkpoint.", hint=_RESTORE)
        if _sha256(file) != digest:
            raise CheckpointError(f"{file} was altered: its SHA-256 is not the manifest's.", hint=_RESTORE)
    return Checkpoint(path, manifest)


def latest(root: Path) -> Found:
    """The newest checkpoint under `root` that verifies. Bad ones are skipped and returned, never loaded."""
    rejected: list[CheckpointError] = []
    for path in reversed(_all(root)):
        try:
            return Found(verify(path), rejected)
        except CheckpointError as error:
            rejected.append(error)
    return Found(None, rejected)


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what interrupted writes left behind."""
    for path in [*_all(root)[:-keep], *root.glob(f".{_PREFIX}*.part")]:
        shutil.rmtree(path, ignore_errors=True)


def _all(root: Path) -> list[Path]:
    return sorted(path for path in root.glob(f"{_PREFIX}*") if path.is_dir())


def _read(path: Path) -> Manifest:
    file = path / MANIFEST
    try:
        body = json.loads(file.read_text())
        digest = body.pop("sha256")
        manifest = Manifest.parse(body, where=str(file))
    except OSError:
        raise CheckpointError(f"{path} is torn: it has no readable {MANIFEST}.", hint=_RESTORE) from None
    except (ValueError, AttributeError, KeyError, TypeError, ConfigError):
        raise CheckpointError(f"{file} was altered: it is no manifest.", hint=_RESTORE) from None
    if digest != _digest(body):
        raise CheckpointError(f"{file} was altered: it does not match its own hash.", hint=_RESTORE)
    return manifest


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _digest(body: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _sync_dir(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
