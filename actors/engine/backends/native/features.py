"""What the native engine offers, by its options. The table in docs/engine.md says the same."""

from __future__ import annotations

from raytide.actors.engine.config import EngineConfig
from raytide.actors.engine.text.structured_output import can_structure
from raytide.actors.engine.types import Feature

__all__ = ["native_features"]

_ALWAYS: frozenset[Feature] = frozenset(
    (
        "bad_words",
        "best_of",
        "embeddings",
        "kv_transfer",
        "logit_bias",
        "logprobs",
        "min_tokens",
        "n",
        "pause",
        "penalties",
        "priority",
        "prompt_logprobs",
        "sampling",
        "sleep",
        "stop_strings",
        "weights_swap",
    )
)


def native_features(config: EngineConfig) -> frozenset[Feature]:
    optional: dict[Feature, bool] = {
        "deterministic": config.deterministic,
        "lora": config.max_loras > 0,
        "prefix_cache": config.prefix_cache,
        "structured": can_structure(),
    }
    return _ALWAYS | {name for name, on in optional.items() if on}
