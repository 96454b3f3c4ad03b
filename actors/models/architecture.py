"""The architecture of a decoder, in numbers: everything that the engine and the trainer need to know about a model
family.

`families.py` reads an architecture from a Hugging Face `config.json`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from raytide.actors.models.components.experts import Experts
from raytide.actors.models.components.llava import VisionSpec
from raytide.actors.models.components.rope import RopeSpec
from raytide.sizing.model_shape import ModelShape

if TYPE_CHECKING:  # planning reads architectures without torch
    from raytide.kernels.core import Activation


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The attention and feed-forward options of one layer.

    `window` is the number of positions that a token sees, including its own. `rope` is an index into
    `Architecture.ropes`.
    """

    attention_scale: float
    window: int | None = None
    rope: int | None = 0
    sparse: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder-only transformer with pre-norms. `names` is the key of the model's weight names in `naming.NAMES`."""

    names: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    max_model_len: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    tied_embeddings: bool
    activation: Activation
    norm_eps: float
    norm_kind: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0  # Gemma multiplies by 1 + weight
    post_norms: bool = False  # Gemma also norms the outputs of attention and feed-forward
    head_norms: bool = False
    gated_ffn: bool = True
    ropes: tuple[RopeSpec, ...] = ()
    learned_positions: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    ffn_bias: bool = False
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    experts: Experts | None = None
    vision: VisionSpec | None = None  # of a model that reads images; its decoder's weights are in `language_model`
    num_labels: int = 0  # of a classification head, in place of the one that generates

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_elements(self) -> int:
        """The number of KV cache elements per token, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def model_shape(arch: Architecture, name: str = "model") -> ModelShape:
    """Returns the sizes of the architecture, in the form that plans use. `name` is the model's name in plans."""
    experts = arch.experts
    return ModelShape(
        name=name,
        layers=arch.num_layers,
        width=arch.hidden_size,
        heads=arch.num_heads,
        kv_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        ffn=arch.ffn_size,
        vocab=arch.vocab_size,
        gated=arch.gated_ffn,
        tied=arch.tied_embeddings,
        layer_norms=arch.norm_kind == "layer",
        qkv_bias=arch.qkv_bias,
        out_bias=arch.attention_out_bias,
        ffn_bias=arch.ffn_bias,
        head_norms=arch.head_norms,
        post_norms=arch.post_norms,
        positions=arch.max_model_len if arch.learned_positions else 0,
        experts=0 if experts is None else experts.count,
        experts_per_token=0 if experts is None else experts.per_token,
        expert_ffn=0 if experts is None else experts.ffn_size,
        windows=tuple(layer.window for layer in arch.layers if layer.window is not None),
        sparse_layers=tuple(index for index, layer in enumerate(arch.layers) if layer.sparse),
    )
