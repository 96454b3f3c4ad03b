"""Reads configs of LLaVA-1.5: a vision encoder, a projector of two layers, and a decoder of another family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from raytide.actors.models.model_config import Fields
from raytide.core.bounds import shortened
from raytide.core.errors import ConfigError, DataError

VisionActivation = Literal["quick_gelu", "gelu", "gelu_tanh", "silu"]

LLAVA = "LlavaForConditionalGeneration"
_DECODERS = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_LLAMA_7B: Mapping[str, object] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,  # a number  # nosec B105
}
"""The fields that configs of LLaVA-1.5 leave out: the defaults of transformers' Llama."""
_ACTIVATIONS: Mapping[str, VisionActivation] = {
    "quick_gelu": "quick_gelu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
}
_MOST_LAYERS, _MOST_IMAGE_SIZE = 1024, 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """A CLIP or SigLIP vision encoder with LLaVA's projector of two layers.

    `num_layers` counts only the layers up to the one whose output is used, so the file may have more layers. If
    `drops_first` is true, the vector of the first position is left out.
    """

    kind: Literal["clip", "siglip"]
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    activation: VisionActivation
    norm_eps: float
    drops_first: bool
    projector_activation: VisionActivation
    projector_bias: bool
    image_token: int  # stands for one vector of an image in the prompt

    @property
    def num_positions(self) -> int:
        return (self.image_size // self.patch_size) ** 2 + (self.kind == "clip")

    @property
    def num_tokens(self) -> int:
        """The number of tokens that stand for an image in a prompt."""
        return self.num_positions - self.drops_first


def decoder_config(fields: Fields) -> Fields:
    """Returns the config of the decoder. A missing dtype or a missing flag for tied embeddings is taken from the whole
    model's config. Other missing fields get default values.
    """
    text = fields.section("text_config")
    kind = text.text("model_type", "llama")
    if kind not in _DECODERS:
        raise ConfigError(f"{text.where}: decoder {kind} is not supported.", hint=f"Supported: {', '.join(_DECODERS)}.")
    whole = {
        "architectures": [_DECODERS[kind]],
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "dtype": fields.text("dtype", fields.text("torch_dtype", "float32")),
    }
    own = {name: value for name, value in text.body.items() if value is not None and name != "architectures"}
    return Fields({**_LLAMA_7B, **whole, **own}, text.where)


def vision_spec(fields: Fields) -> VisionSpec:
    """Returns the specs of the vision encoder and of the projector, from a model's config."""
    vision = fields.section("vision_config")
    kind = vision.text("model_type", "clip_vision_model").removesuffix("_vision_model")
    if kind not in ("clip", "siglip"):
        raise ConfigError(f"{vision.where}: tower {kind} is not supported.", hint="Supported: clip, siglip.")
    is_clip, depth = kind == "clip", vision.whole("num_hidden_layers", most=_MOST_LAYERS)
    layer, strategy = (
        fields.body.get("vision_feature_layer", -2),
        fields.text("vision_feature_select_strategy", "default"),
    )
    count = layer + depth + 1 if isinstance(layer, int) and layer < 0 else layer
    if not isinstance(count, int) or not 0 < count < depth or strategy not in ("default", "full"):
        raise ConfigError(
            f"{fields.where}: vision_feature_layer {shortened(str(layer), 50)} with {strategy} is not supported.",
            hint="Supported: one layer below the last, with default or full.",
        )
    spec = VisionSpec(
        kind="clip" if is_clip else "siglip",
        hidden_size=vision.whole("hidden_size"),
        ffn_size=vision.whole("intermediate_size"),
        num_layers=count,
        num_heads=vision.whole("num_attention_heads"),
        image_size=vision.whole("image_size", most=_MOST_IMAGE_SIZE),
        patch_size=vision.whole("patch_size"),
        activation=_activation(vision, "hidden_act", "quick_gelu" if is_clip else "gelu_pytorch_tanh"),
        norm_eps=vision.number("layer_norm_eps", 1e-5 if is_clip else 1e-6),
        drops_first=strategy == "default",
        projector_activation=_activation(fields, "projector_hidden_act", "gelu"),
        projector_bias=fields.flag("multimodal_projector_bias", True),
        image_token=fields.whole("image_token_index", fields.whole("image_token_id", 32000)),
    )
    if spec.hidden_size % spec.num_heads or not 0 < spec.patch_size <= spec.image_size:
        raise DataError(f"{vision.where}: its sizes do not fit together.", hint="Export the model again.")
    return spec


def _activation(fields: Fields, name: str, default: str) -> VisionActivation:
    known = _ACTIVATIONS.get(fields.text(name, default))
    if known is None:
        raise ConfigError(f"{fields.where}: {name} is not supported.", hint=f"One of {', '.join(_ACTIVATIONS)}.")
    return known
