"""The sizes of an architecture, as the planner needs them."""

from __future__ import annotations

from raytide.actors.models.architecture import Architecture
from raytide.sizing.model_shape import ModelShape


def model_shape(arch: Architecture, name: str = "model") -> ModelShape:
    """Returns the sizes of the architecture; `name` is what plans call the model."""
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
        sparse_layers=tuple(index for index, layer in enumerate(arch.layers) if layer.sparse),
    )
