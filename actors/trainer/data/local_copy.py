"""Local copies of remote data in this user's private cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from raytide.core.io.private_folder import lock, private_folder, require_free_space
from raytide.core.io.storage import full_disk_is_an_error, join, named_failures, open_url, read_bytes
from raytide.core.io.token_dataset import CONFIG, END_BYTES, ITEM_BYTES, MANIFEST, TokenManifest, parse_manifest


def local_copy(dataset: str, *, with_shards: bool = True) -> Path:
    """Returns the local directory of a dataset. A remote dataset is copied once per machine, user and hash of its
    manifest.

    Only the files that the manifest names are copied. Without `with_shards`, only the manifest and the tokenizer are
    copied. Raises StorageError if the store cannot be reached, or if the files do not fit on the disk. A partial copy
    is removed.
    """
    if "://" not in dataset:
        return Path(dataset)
    with named_failures(dataset):
        body = read_bytes(join(dataset, MANIFEST))
    manifest = parse_manifest(body, join(dataset, MANIFEST))
    home = private_folder("datasets") / (hashlib.sha256(body).hexdigest()[:32] + ("" if with_shards else "-described"))
    if home.exists():
        return home
    with lock(home.with_suffix(".lock")):
        if not home.exists():
            files = _files(dataset, manifest if with_shards else manifest.model_copy(update={"shards": ()}))
            _fetch(dataset, files, home, sum(size for size in files.values()))
    return home


def local_file_copy(url: str, version: str, suffix: str) -> Path:
    """Returns a local copy of one remote file. The copy is made once per machine, user and `version`."""
    home = private_folder("datasets") / f"{version}{suffix}"
    if home.exists():
        return home
    with lock(home.with_suffix(".lock")):
        if not home.exists():
            fs, path = open_url(url)
            part = home.with_suffix(".part")
            require_free_space(home.parent, int(fs.size(path) or 0), url)
            with full_disk_is_an_error(str(home)):
                try:
                    fs.get_file(path, str(part))
                    os.replace(part, home)
                finally:
                    part.unlink(missing_ok=True)
    return home


def _files(dataset: str, manifest: TokenManifest) -> dict[str, int]:
    """Returns the files to copy and their sizes in bytes (0 if unknown). Names come from the manifest and not from a
    listing, whose names could lead out of the folder.
    """
    fs, path = open_url(dataset)
    beside = [name for name in (manifest.tokenizer, CONFIG) if fs.exists(join(path, name))]
    shards = {shard.file: shard.tokens * ITEM_BYTES[manifest.dtype] for shard in manifest.shards}
    indices = {index.file: index.documents * END_BYTES for shard in manifest.shards if (index := shard.index)}
    return {MANIFEST: 0, **dict.fromkeys(beside, 0), **shards, **indices}


def _fetch(dataset: str, files: Mapping[str, int], home: Path, needed: int) -> None:
    part = home.with_suffix(".part")  # also removes what a killed process left: this process holds the lock
    fs, path = open_url(dataset)
    try:
        shutil.rmtree(part, ignore_errors=True)
        require_free_space(home.parent, needed, dataset)
        with full_disk_is_an_error(f"{dataset} to {home}: {needed / 1e9:.3f} GB are needed there"):
            for name in files:
                (part / name).parent.mkdir(parents=True, exist_ok=True)
            fs.get([join(path, name) for name in files], [str(part / name) for name in files])
            part.rename(home)
    finally:
        shutil.rmtree(part, ignore_errors=True)
