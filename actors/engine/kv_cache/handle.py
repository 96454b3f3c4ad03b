"""The KV of one request in transit between two engines: a header, and the raw blocks of each layer in host memory. This
module needs only numpy, so that a router can hold and forward the KV.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raytide.core.errors import ConflictError, DataError

Bytes = npt.NDArray[np.uint8]

_MAGIC = b"raytide-kv-1\n"
# Must be equal for one engine's blocks to mean the same in another.
_IDENTITY = ("model", "weights_version", "lora", "dtype", "layout", "block_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvHeader:
    """The description of an exported request's KV.

    `model` is a hash of the architecture and of the rotation in use. `layout` is the size in bytes of one block in each
    layer. `tokens` are the prompt and the output. The blocks hold the KV of the first `num_computed` tokens. `seed` is
    the request's sampling seed.
    """

    model: str
    weights_version: str
    lora: str | None
    dtype: str
    layout: list[int]
    block_size: int
    tokens: list[int]
    prompt_len: int
    num_computed: int
    num_cached: int
    seed: int

    @property
    def num_blocks(self) -> int:
        return -(-self.num_computed // self.block_size)


@dataclass(frozen=True, slots=True, eq=False)
class KvHandle:
    """The exported KV of a request: a header and, for each layer, one flat array of bytes. The array has the layer's
    blocks in the order of the tokens.
    """

    header: KvHeader
    layers: tuple[Bytes, ...]

    def check_fits(self, own: KvHeader) -> None:
        """Raises ConflictError if an engine cannot use these blocks. `own` is a header that describes that engine."""
        for name in _IDENTITY:
            theirs, ours = getattr(self.header, name), getattr(own, name)
            if theirs != ours:
                raise ConflictError(
                    f"this KV has {name} {theirs!r}, the engine has {ours!r}.",
                    hint="Import into an engine of the same model, weights and options, or send the prompt instead.",
                )

    def to_bytes(self) -> bytes:
        """Returns the handle as bytes: a magic number, the header and the layers, with lengths and checksums."""
        sums = [zlib.crc32(layer.data) for layer in self.layers]
        header = json.dumps(asdict(self.header) | {"checksums": sums}).encode()
        return b"".join(
            (_MAGIC, len(header).to_bytes(8, "little"), header, *(layer.tobytes() for layer in self.layers))
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> KvHandle:
        """Returns the handle from the output of `to_bytes`. Raises DataError for any other input."""
        body = memoryview(data)
        at = len(_MAGIC) + 8
        if bytes(body[: len(_MAGIC)]) != _MAGIC:
            raise _damaged("it does not begin like one")
        end = at + int.from_bytes(body[len(_MAGIC) : at], "little")
        try:
            parsed: dict[str, Any] = json.loads(bytes(body[at:end]))
            sums = parsed.pop("checksums")
            header = KvHeader(**parsed)
            sizes = [size * header.num_blocks for size in header.layout]
        except (ValueError, KeyError, TypeError):
            raise _damaged("its header cannot be read") from None
        if len(sums) != len(sizes) or end + sum(sizes) != len(data):
            raise _damaged(f"it has {len(data)} bytes, its header implies {end + sum(sizes)}")
        layers: list[Bytes] = []
        for size, checksum in zip(sizes, sums, strict=True):
            layer = np.frombuffer(body[end : end + size], np.uint8)
            if zlib.crc32(layer.data) != checksum:
                raise _damaged(f"layer {len(layers)} was altered")
            layers.append(layer)
            end += size
        return cls(header, tuple(layers))


def _damaged(why: str) -> DataError:
    return DataError(f"these {_MAGIC.decode().strip()} bytes are no KV handle: {why}.", hint="Export it again.")
