"""Replaces the weights of a running vLLM in place. vLLM's workers load the weights of another directory. vLLM then
recomputes the KV of the running requests.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open

from raytide.actors.engine.backends.vllm.launch import VllmCore
from raytide.actors.models.content import content_digest
from raytide.actors.models.families import is_same_architecture, read_architecture
from raytide.core.errors import ConfigError, ConflictError, DataError, EngineError


class ServedWeights:
    """The weights that a vLLM core currently serves. Use it from the engine's event loop."""

    def __init__(self, core: VllmCore, model_dir: Path) -> None:
        self._core, self._model_dir = core, model_dir
        self.version = content_digest(model_dir) if any(model_dir.glob("*.safetensors")) else ""
        """The version of the served weights; empty for files without safetensors, whose weights cannot be exchanged."""
        self._swapping = asyncio.Lock()
        self._exchanges = set[asyncio.Task[str]]()

    async def swap(self, source: str, version: str | None, *, stays_paused: bool) -> str:
        """Replaces the served weights by those of another directory from the next step on. Returns the version of the
        new weights.

        vLLM pauses while it overwrites its weights in place. Afterwards it computes the KV of running requests
        again. Raises ConflictError if the new weights have another architecture, and DataError if their files cannot
        be read. If vLLM fails to load the new weights, it loads the old ones again, and this call raises
        EngineError. If the call is cancelled, the replacement continues in the background until it is complete.
        """
        model_dir = Path(source)
        found = await asyncio.to_thread(_checked, model_dir, self._model_dir)
        exchange = asyncio.create_task(self._exchange(model_dir, version or found, stays_paused=stays_paused))
        self._exchanges.add(exchange)  # the event loop itself keeps no task alive
        exchange.add_done_callback(self._exchanges.discard)
        return await asyncio.shield(exchange)

    async def _exchange(self, model_dir: Path, version: str, *, stays_paused: bool) -> str:
        async with self._swapping:
            llm = self._core.llm
            await llm.pause_generation(mode="keep", clear_cache=False)
            try:
                try:
                    await self._read(model_dir)
                except Exception as error:
                    await self._read(self._model_dir)
                    raise EngineError(
                        f"vLLM cannot read the weights of {model_dir}: {error}", hint="It keeps those that it had."
                    ) from error
                await llm.reset_prefix_cache(reset_running_requests=True)
            finally:
                if not stays_paused:
                    await llm.resume_generation()
            self._model_dir, self.version = model_dir, version
        return version

    async def _read(self, model_dir: Path) -> None:
        await self._core.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model_dir)})


def _checked(theirs: Path, ours: Path) -> str:
    """Returns the digest of the new weights. Raises ConflictError unless their architecture and tensors match the
    present ones, DataError if they cannot be read.
    """
    found = content_digest(theirs)
    try:
        differs = _shapes(theirs) != _shapes(ours)
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot read {theirs}: {error}.", hint="The file is missing or damaged.") from None
    with suppress(ConfigError):  # of a family that only vLLM computes, and only its tensors describe here
        differs |= not is_same_architecture(read_architecture(theirs), read_architecture(ours))
    if differs:
        raise ConflictError(
            f"{theirs} holds a model of another architecture than {ours}.", hint="Start another engine for it."
        )
    return found


def _shapes(model_dir: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the dtype and shape of each tensor by name."""
    found = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                tensor = file.get_slice(name)
                found[name] = (str(tensor.get_dtype()), tuple(tensor.get_shape()))
    return found
