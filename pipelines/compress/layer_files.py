"""Writes a model directory one layer at a time. A killed writer resumes after its last complete layer.

Each layer is a file. The directory is built under a hidden name, which contains the digest of the step and its
input. Once complete, the directory is moved to its target.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from raytide.actors.models.model_config import read_json
from raytide.actors.models.tokenizer_files import POOLING_FILES, tokenizer_files
from raytide.actors.trainer.hf.safetensors_writer import save
from raytide.core.errors import ConfigError, ConflictError, DataError
from raytide.core.io.atomic_file import sync
from raytide.core.io.storage import full_disk_is_an_error

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor]

RECORD = "raytide_step.json"
"""The name of the file that records which step wrote a directory, and from which input."""


class LayerFiles:
    """A model directory that is being written. `digest` identifies the step and its input. An interrupted write is
    resumed only if it has the same digest.
    """

    def __init__(self, target: Path, digest: str) -> None:
        self._target, self._digest = target, digest
        self.folder = target.with_name(f".{target.name}.{digest[:12]}.part")
        with full_disk_is_an_error(str(target)):
            self.folder.mkdir(parents=True, exist_ok=True)

    def write(
        self, count: int, layer: Callable[[int], Tensors], *, on_layer: Callable[[int, int], None] = lambda at, of: None
    ) -> None:
        """Writes `count` files. `layer(i)` returns the tensors of file i. If the file exists already, `layer` is not
        called for it.
        """
        index: dict[str, str] = {}
        total = 0
        for at in range(count):
            name = f"model-{at + 1:05d}-of-{count:05d}.safetensors"
            if not (self.folder / name).exists():
                tensors = {key: each.contiguous() for key, each in layer(at).items()}
                staged = self.folder / f".{name}.part"
                with full_disk_is_an_error(str(self._target)):
                    save(tensors, staged)
                    sync(staged)
                    staged.rename(self.folder / name)
            sizes = _sizes(self.folder / name)
            index |= dict.fromkeys(sizes, name)
            total += sum(sizes.values())
            on_layer(at + 1, count)
        body = {"metadata": {"total_size": total}, "weight_map": index}
        self._json("model.safetensors.index.json", body)

    def finish(self, config: Mapping[str, object], source: Path, record: Mapping[str, object]) -> None:
        """Writes the config and copies the tokenizer files. Then moves the directory to its target.

        Raises ConflictError if the target exists.
        """
        with full_disk_is_an_error(str(self._target)):
            for name, file in tokenizer_files(source).items():
                shutil.copyfile(file, self.folder / name)
            copy_pooling(source, self.folder, config.get("hidden_size"))
            self._json("config.json", config)
            write_record(self.folder, self._digest, record)
            publish(self.folder, self._target)

    def _json(self, name: str, body: Mapping[str, object]) -> None:
        with full_disk_is_an_error(str(self._target)):
            (self.folder / name).write_text(json.dumps(body, indent=2) + "\n")


def copy_pooling(source: Path, folder: Path, width: object = None) -> None:
    """Copies the files that define how hidden states become an embedding, with the model's new `width` if given. Does
    nothing if there are no such files, or if a module has weights of its own, which are not copied.
    """
    if any(source.glob("[1-9]*_*/*.safetensors")) or any(source.glob("[1-9]*_*/pytorch_model.bin")):
        return
    with full_disk_is_an_error(str(folder)):
        for name in POOLING_FILES:
            if (source / name).is_file():
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source / name, folder / name)
        pooling = folder / "1_Pooling" / "config.json"
        if width is not None and pooling.is_file():
            pooling.write_text(json.dumps({**read_json(pooling), "word_embedding_dimension": width}))


def write_record(folder: Path, digest: str, record: Mapping[str, object]) -> None:
    """Writes a file that records which step made the directory. Call it before `publish`."""
    with full_disk_is_an_error(str(folder)):
        (folder / RECORD).write_text(json.dumps({**record, "digest": digest}, indent=2) + "\n")


def publish(folder: Path, target: Path) -> None:
    """Moves a finished directory to its target. Raises ConflictError if the target exists."""
    if target.exists():
        raise ConflictError(f"{target} exists.", hint="Remove it, or choose another out.")
    folder.rename(target)


def digest_in(folder: Path) -> str | None:
    """Returns the digest of the step that wrote a directory, or None if there is no directory.

    Raises ConflictError if no step wrote the directory.
    """
    if not folder.exists():
        return None
    try:
        return str(read_record(folder)["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConflictError(
            f"{folder} was not written by raytide compress.", hint="Choose another out, or move it away."
        ) from None


def read_record(folder: Path) -> dict[str, object]:
    """Returns the content of the record that `write_record` wrote."""
    body: dict[str, object] = json.loads((folder / RECORD).read_text())
    return body


def remove_others(target: Path, digest: str) -> None:
    """Removes the unfinished directories of `target`, except the directory for `digest`."""
    for folder in target.parent.glob(f".{target.name}.*.part"):
        if folder.name != f".{target.name}.{digest[:12]}.part":
            shutil.rmtree(folder, ignore_errors=True)


def plain_config(source: Path) -> dict[str, object]:
    """Returns the config of a model directory. Raises ConfigError if the model's weights are quantised already."""
    config = read_json(source / "config.json")
    if config.get("quantization_config") is not None:
        raise ConfigError(f"{source} is quantised already.", hint="Start from the model before that.")
    return config


def by_layer(names: Sequence[str], prefixes: Iterable[str]) -> list[list[str]]:
    """Groups names by layer. The first group has the names outside of layers. Each further group has the names with one
    layer's prefix.
    """
    groups: dict[str, list[str]] = {"": [], **{prefix: [] for prefix in prefixes}}
    for name in names:
        groups[next((prefix for prefix in groups if prefix and name.startswith(prefix)), "")].append(name)
    return [group for group in groups.values() if group]


def _sizes(file: Path) -> dict[str, int]:
    """Returns the bytes of each tensor of a file."""
    try:
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        return {
            name: entry["data_offsets"][1] - entry["data_offsets"][0]
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} is damaged: {error}.", hint="Remove it, and run the recipe again.") from None
