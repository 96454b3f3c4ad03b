"""The layers of a model whose weights exceed the memory limit for weights. The first layers stay in memory. Each of the
remaining layers is read from the files in every pass, while the previous layer computes.

The layers are built by the same code as those of any other model. The results are therefore bitwise identical to
those of a model that is fully in memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from raytide.actors.engine.model.weight_loader import WeightLoader
from raytide.core.errors import ConfigError
from raytide.kernels.core import LayerWeights

_M_MMAP_THRESHOLD = -3
_RETURNED_BYTES = 1 << 20


class StreamedLayers:
    """The layers in order, for any number of passes, one pass at a time. Iterating raises DataError when a file can no
    longer be read.
    """

    def __init__(self, build: WeightLoader, resident: list[LayerWeights], count: int) -> None:
        self._build, self._resident, self._count = build, resident, count
        self._reader = ThreadPoolExecutor(1, "raytide-layers")
        self._ahead: tuple[int, Future[LayerWeights]] | None = None

    @property
    def num_streamed(self) -> int:
        return self._count - len(self._resident)

    def __iter__(self) -> Iterator[LayerWeights]:
        yield from self._resident
        first = len(self._resident)
        for index in range(first, self._count):
            layer = self._take(index)
            # Behind the last one, the first is read for the next pass.
            following = index + 1 if index + 1 < self._count else first
            self._ahead = following, self._reader.submit(self._build.layer, following)
            yield layer
            del layer  # before the next one is waited for

    def _take(self, index: int) -> LayerWeights:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            read, layer = ahead
            if read == index:
                return layer.result()
            layer.cancel()  # a pass that ended early
        return self._build.layer(index)


def load_layers(
    build: WeightLoader, count: int, limit_bytes: int, *, embedding_bytes: int
) -> list[LayerWeights] | StreamedLayers:
    """Returns the model's layers. As many layers stay in memory as fit into `limit_bytes`. Builds every layer once, so
    that bad files are found now.

    The limit must also hold the embedding, an output head of the same size, and two more layers: one in use and one
    that is being read. Raises ConfigError if the limit is too low for that.
    """
    _return_freed_memory()
    kept, sizes, largest = list[LayerWeights](), list[int](), 0
    for index in range(count):
        before = build.built_bytes
        layer = build.layer(index)
        sizes.append(build.built_bytes - before)
        largest = max(largest, sizes[-1])
        in_flight = 2 * largest + build.scratch_bytes
        if len(kept) == index:
            kept.append(layer)
        del layer
        while kept and 2 * embedding_bytes + sum(sizes[: len(kept)]) + in_flight > limit_bytes:
            kept.pop()
    if 2 * embedding_bytes + sum(sizes) <= limit_bytes:
        return [*kept, *(build.layer(index) for index in range(len(kept), count))]
    least = 2 * embedding_bytes + 2 * largest + build.scratch_bytes
    if least > limit_bytes:
        raise ConfigError(
            f"weights_memory_gb {limit_bytes / 1e9:g} is too little for this model: its embedding and head, a layer in "
            f"use and one that is being read take {least / 1e9:.2g} GB.",
            hint=f"Give {1.1 * least / 1e9:.2g} or more.",
        )
    return StreamedLayers(build, kept, count)


def _return_freed_memory() -> None:
    """Makes glibc return freed blocks of a megabyte or more to the system. Otherwise it keeps freed blocks below 32 MB,
    and those of many layers' matrices would take more memory than the layers in use.
    """
    try:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _RETURNED_BYTES)
    except AttributeError:  # another C library, with a limit of its own
        return
