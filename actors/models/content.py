"""Computes a hash of the weights in a directory. The hash takes milliseconds for weights of any size."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from raytide.actors.models.model_config import read_json
from raytide.actors.models.quantized.gguf.gguf_file import GgufFile, is_gguf
from raytide.core.errors import ConflictError, DataError
from raytide.core.io.private_paths import safe_opener

MOST_HEADER_BYTES = 32 << 20
"""The most bytes of the headers of all files of a directory together. A model of 140,000 tensors has 20 MB."""
_PIECES, _PIECE = 4, 4096  # bytes read of each tensor, spread evenly; smaller tensors are read whole


def content_digest(model_dir: Path) -> str:
    """Returns a hash of the weights in a directory. The hash covers every tensor's name, dtype, shape and offset, and
    up to 16 KiB of the tensor's content. It also covers a `quantization_config`, because the meaning of the tensors
    depends on that config.

    The hash takes milliseconds. It detects files that were replaced by files of another training step, run or merge.
    The same files in another directory have the same hash. A change of a few elements in a large tensor may go
    unnoticed. GGUF files are hashed in the same way.
    """
    if is_gguf(model_dir):
        return _gguf_digest(GgufFile(model_dir))
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise DataError(f"{model_dir} holds no *.safetensors file.", hint="Point at a Hugging Face model directory.")
    digest, left = blake2b(_quantization(model_dir), digest_size=8), MOST_HEADER_BYTES
    for path in files:
        try:
            left -= header_bytes(path, left)
            _add(path, digest)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"cannot read {path}: {error}.", hint="The file is missing or damaged.") from None
    return digest.hexdigest()


def _gguf_digest(file: GgufFile) -> str:
    digest = blake2b(file.data[: file.header_bytes], digest_size=8)
    for tensor in file.tensors.values():
        for at in _samples(tensor.start, tensor.start + tensor.bytes):
            digest.update(file.data[at : min(at + _PIECE, tensor.start + tensor.bytes)])
    return digest.hexdigest()


def _samples(start: int, end: int) -> range:
    """Returns the starts of the pieces of a tensor's content that are read."""
    return range(start, end, max(_PIECE, (end - start - _PIECE) // (_PIECES - 1)))


def _quantization(model_dir: Path) -> bytes:
    path = model_dir / "config.json"
    found = read_json(path).get("quantization_config") if path.is_file() else None
    return b"" if found is None else json.dumps(found, sort_keys=True).encode()


def header_bytes(path: Path, most: int = MOST_HEADER_BYTES) -> int:
    """Returns the size in bytes of a safetensors file's header. Raises ValueError if the header is longer than the file
    or than `most`. Raises OSError if the path is not a regular file.
    """
    with open(path, "rb", opener=safe_opener) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > os.fstat(file.fileno()).st_size:
            raise ValueError("its header is longer than the file")
    if length > most:
        raise ValueError(f"the headers of this directory exceed {MOST_HEADER_BYTES >> 20} MiB")
    return length


def _add(path: Path, digest: blake2b) -> None:
    with open(path, "rb", opener=safe_opener) as file:
        header = file.read(min(int.from_bytes(file.read(8), "little"), MOST_HEADER_BYTES))
        size = os.fstat(file.fileno()).st_size
        digest.update(header)
        base = 8 + len(header)
        for name, tensor in json.loads(header).items():
            if name == "__metadata__":
                continue
            start, end = tensor["data_offsets"]
            if not 0 <= start <= end <= size - base:
                raise ValueError(f"tensor {name[:100]} is outside of the file")
            for at in _samples(start, end):
                file.seek(base + at)
                digest.update(file.read(min(_PIECE, end - at)))


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """A model directory with a version. The version is a name that the caller gave, or else the hash of the directory's
    content.
    """

    model_dir: Path
    content: str
    version: str

    @classmethod
    def at(cls, model_dir: Path, version: str | None = None) -> WeightsSource:
        content = content_digest(model_dir)
        return cls(model_dir, content, version or content)

    def check_unchanged(self) -> None:
        """Raises ConflictError when the directory now holds other weights."""
        found = content_digest(self.model_dir)
        if found != self.content:
            raise ConflictError(
                f"{self.model_dir} no longer holds the weights {self.version}: their content was {self.content}, "
                f"now it is {found}.",
                hint="Put them back, or load the new ones under a version of their own.",
            )
