"""Models of published runs, as the planner sees them."""

from raytide.sizing.model_shape import ModelShape


def gpt(layers: int, width: int, heads: int) -> ModelShape:
    """Returns a GPT of Megatron-LM's papers: LayerNorm, biases, learned positions, a vocabulary of 51,200."""
    return ModelShape(
        layers=layers, width=width, heads=heads, kv_heads=heads, head_dim=width // heads, ffn=4 * width, vocab=51_200,
        gated=False, tied=True, layer_norms=True, positions=2048, qkv_bias=True, out_bias=True, ffn_bias=True,
    )  # fmt: skip
