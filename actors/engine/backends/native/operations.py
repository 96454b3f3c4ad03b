"""What the engine can do between two steps: pause, sleep, change its weights, say what it has cached.

Nothing here loses a request: KV that is gone is computed again from the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.backends.native.weights import WeightsSource
from raytide.actors.engine.kv_cache.block_pool import chain_hash
from raytide.actors.engine.model.decoder import Decoder
from raytide.actors.engine.model.pooling import pooling_of
from raytide.actors.models.content import content_of
from raytide.actors.models.families import read_architecture
from raytide.core.errors import ConflictError

__all__ = [
    "cached_prefix",
    "embed",
    "load_lora",
    "pause",
    "read_weights",
    "resume",
    "sleep",
    "unload_lora",
    "use_weights",
    "wake",
]


def pause(loop: EngineCore) -> None:
    """Take no steps until `resume`."""
    if loop.state == "serving":
        loop.state = "paused"


def resume(loop: EngineCore) -> None:
    if loop.state == "asleep":
        raise ConflictError("the engine sleeps.", hint="Wake it.")
    loop.state = "serving"


def sleep(loop: EngineCore, level: Literal[1, 2]) -> None:
    """Give back the memory of the KV, at level 2 also that of the weights. From level 1 it can go on to 2."""
    loop.scheduler.invalidate()
    loop.state = "asleep"
    loop.runner.sleep(level)


def wake(loop: EngineCore) -> None:
    """Take the memory again and go on. When that fails the engine sleeps on, and `wake` can be tried again."""
    if loop.state != "asleep":
        return
    if not loop.runner.has_weights:
        loop.weights.check_unchanged()
        loop.runner.use(loop.runner.load(loop.weights.model_dir))
    loop.runner.allocate()
    loop.state = "serving"


def read_weights(loop: EngineCore, source: str, version: str | None) -> tuple[Decoder, WeightsSource]:
    """Load other weights while the loop goes on with its own; from any thread. Raises ConflictError for another
    architecture, or when the files change under the reader.
    """
    model_dir = Path(source)
    theirs, ours = read_architecture(model_dir), loop.runner.arch
    if replace(theirs, dtype=ours.dtype, eos_token_ids=ours.eos_token_ids) != ours:
        raise ConflictError(
            f"{model_dir} holds a model of another architecture than {loop.weights.model_dir}.",
            hint="Start another engine for it.",
        )
    weights = WeightsSource.at(model_dir, version)
    model = loop.runner.load(model_dir)
    weights.check_unchanged()
    return model, weights


def use_weights(loop: EngineCore, model: Decoder, weights: WeightsSource) -> None:
    """Compute with these weights from the next step on; running requests go on with them."""
    loop.runner.use(model)
    loop.weights = weights
    loop.info = replace(loop.info, weights_version=weights.version)
    loop.salt_again()
    loop.scheduler.invalidate()


def embed(loop: EngineCore, prompts: list[list[int]]) -> list[list[float]]:
    """One vector for each prompt, pooled as the model directory says. The caller bounds how many tokens these are."""
    return loop.runner.embed(prompts, pooling_of(loop.weights.model_dir))


def load_lora(loop: EngineCore, name: str, path: str) -> None:
    folder = Path(path)
    loop.runner.load_lora(name, folder)
    content = content_of(folder).encode() + (folder / "adapter_config.json").read_bytes()
    loop.adapter_contents[name] = blake2b(content, digest_size=8).hexdigest()


def unload_lora(loop: EngineCore, name: str) -> None:
    """Raises ConflictError while requests use it."""
    if loop.uses_lora(name):
        raise ConflictError(f"requests use adapter {name}.", hint="Unload it when they have ended.")
    loop.runner.unload_lora(name)
    del loop.adapter_contents[name]


def cached_prefix(loop: EngineCore, tokens: Items[int], lora: str | None, cache_salt: str) -> int:
    """How many of a prompt's first tokens are in the prefix cache; its last one is computed in any case."""
    size, parent, hashes = loop.pool.block_size, loop.salt(lora, cache_salt), list[bytes]()
    for start in range(0, (len(tokens) - 1) // size * size, size):
        parent = chain_hash(parent, tokens[start : start + size])
        hashes.append(parent)
    return len(loop.pool.match(hashes)) * size
