"""A model's shape, read from its Hugging Face `config.json`. Says no to what the decoder in `model.py` does not
compute.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raytide.core.errors import ConfigError, DataError

__all__ = ["SUPPORTED", "Architecture", "RopeScaling", "read_architecture", "read_json"]

SUPPORTED = ("LlamaForCausalLM",)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """`linear` divides the frequencies by `factor`; `llama3` does so for the long wavelengths only."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192

    def apply(self, frequency: float) -> float:
        if self.kind == "linear":
            return frequency / self.factor
        wavelength = 2 * math.pi / frequency
        if wavelength < self.original_max_len / self.high_freq_factor:
            return frequency
        if wavelength > self.original_max_len / self.low_freq_factor:
            return frequency / self.factor
        smooth = (self.original_max_len / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        return (1 - smooth) * frequency / self.factor + smooth * frequency


@dataclass(frozen=True, slots=True)
class Architecture:
    """A Llama-style decoder's numbers."""

    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    max_model_len: int
    dtype: str
    eos_token_ids: tuple[int, ...]

    @property
    def kv_elements(self) -> int:
        """Numbers of KV cache that one token takes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model directory, or a DataError that says what is wrong with the file."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}.", hint="Point at a Hugging Face model directory."
        ) from None
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}.", hint="Export or download the model again.") from None
    if not isinstance(body, dict):
        raise DataError(f"{path} holds no JSON object.", hint="Export or download the model again.")
    return body


def read_architecture(model_dir: Path) -> Architecture:
    """The architecture of a model directory. Raises DataError (unreadable) or ConfigError (not supported)."""
    body = read_json(model_dir / "config.json")
    names = body.get("architectures") or ["(none)"]
    if names[0] not in SUPPORTED:
        raise ConfigError(
            f"{model_dir}: architecture {names[0]} is not supported.", hint=f"Supported: {', '.join(SUPPORTED)}."
        )
    if body.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{model_dir}: activation {body['hidden_act']} is not supported.", hint="Supported: silu.")
    try:
        return _architecture(body, model_dir)
    except KeyError as error:
        raise DataError(
            f"{model_dir}/config.json has no {error}.", hint="Export or download the model again."
        ) from None


def _architecture(body: Mapping[str, Any], model_dir: Path) -> Architecture:
    rope = body.get("rope_parameters") or body.get("rope_scaling") or {}
    heads = body["num_attention_heads"]
    eos = body.get("eos_token_id")
    return Architecture(
        vocab_size=body["vocab_size"],
        hidden_size=body["hidden_size"],
        ffn_size=body["intermediate_size"],
        num_layers=body["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=body.get("num_key_value_heads") or heads,
        head_dim=body.get("head_dim") or body["hidden_size"] // heads,
        norm_eps=body.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or body.get("rope_theta") or 10000.0),
        rope_scaling=_rope_scaling(rope, body, model_dir),
        tied_embeddings=body.get("tie_word_embeddings", False),
        attention_bias=body.get("attention_bias", False),
        mlp_bias=body.get("mlp_bias", False),
        max_model_len=body.get("max_position_embeddings", 2048),
        dtype=body.get("dtype") or body.get("torch_dtype") or "float32",
        eos_token_ids=as_ids(eos),
    )


def as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Hugging Face writes one id, a list of ids, or null."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _rope_scaling(rope: Mapping[str, Any], body: Mapping[str, Any], model_dir: Path) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind, float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            kind,
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope.get("original_max_position_embeddings") or body["max_position_embeddings"]),
        )
    raise ConfigError(f"{model_dir}: rope scaling {kind} is not supported.", hint="Supported: default, linear, llama3.")
