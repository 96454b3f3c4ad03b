"""The adapters that an engine has loaded, by name, and which rows of a step each of them has."""

from __future__ import annotations

from raytide.actors.engine.model.lora import Adapter, LoraRows
from raytide.actors.engine.sequence import Chunk
from raytide.core.errors import CapacityError, ConflictError, NotFoundError

__all__ = ["LoraManager"]


class LoraManager:
    """Loading and unloading go on between two steps; sequences of other adapters notice nothing."""

    def __init__(self, limit: int) -> None:
        self._by_name: dict[str, Adapter] = {}
        self._ids: dict[str, str] = {}
        self._limit = limit
        self._loads = 0

    def check_free(self, name: str) -> None:
        """Raise when `name` is taken, or when no further adapter may be loaded."""
        if name in self._by_name:
            raise ConflictError(f"adapter {name} is already loaded.", hint="Unload it first, or choose another name.")
        if len(self._by_name) >= self._limit:
            raise CapacityError(
                f"{self._limit} adapters are loaded already.", hint="Unload one, or give the engine more max_loras."
            )

    def add(self, name: str, adapter: Adapter) -> None:
        self.check_free(name)
        self._loads += 1
        self._by_name[name], self._ids[name] = adapter, f"{name}/{self._loads}"

    def remove(self, name: str) -> None:
        """The caller sees to it that no sequence uses it any more."""
        self._get(name)
        del self._by_name[name], self._ids[name]

    def id_of(self, name: str) -> str:
        """Differs between adapters that had the same name one after the other: KV is shared by it, not by name."""
        self._get(name)
        return self._ids[name]

    def group(self, chunks: list[Chunk]) -> list[Chunk]:
        """The chunks with those of one adapter side by side, so that it computes them together."""
        if not self._by_name:
            return chunks
        return sorted(chunks, key=lambda chunk: chunk.seq.lora or "")

    def rows(self, chunks: list[Chunk]) -> LoraRows | None:
        """None when no chunk uses an adapter. Raises NotFoundError for a sequence of one that is not loaded."""
        if all(chunk.seq.lora is None for chunk in chunks):
            return None
        adapters = [(None if chunk.seq.lora is None else self._get(chunk.seq.lora), chunk.length) for chunk in chunks]
        return LoraRows.of(adapters)

    def _get(self, name: str) -> Adapter:
        if name not in self._by_name:
            raise NotFoundError(f"adapter {name} is not loaded.", hint="Load it first.")
        return self._by_name[name]
