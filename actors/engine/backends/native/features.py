"""The features that the native engine declares for a model and its options."""

from __future__ import annotations

from raytide.actors.engine.config import EngineConfig
from raytide.actors.engine.text.structured_output import can_structure
from raytide.actors.engine.types import Feature
from raytide.actors.models.architecture import Architecture

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
        "resume",
        "sampling",
        "sleep",
        "stop_strings",
        "weights_swap",
    )
)


def native_features(config: EngineConfig, arch: Architecture) -> frozenset[Feature]:
    """Returns the optional features of an engine with these options."""
    optional: dict[Feature, bool] = {
        "classification": arch.num_labels > 0,
        "images": arch.vision is not None,
        "deterministic": config.deterministic,
        "lora": config.max_loras > 0,
        "prefix_cache": config.prefix_cache,
        "structured": can_structure(),
    }
    return _ALWAYS | {name for name, on in optional.items() if on}
