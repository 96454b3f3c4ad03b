"""Published models by name, for plans without a config file."""

from __future__ import annotations

from raytide.sizing.model_shape import ModelShape


def _llama(name: str, layers: int, width: int, heads: int, kv_heads: int, ffn: int, vocab: int = 128_256) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width // heads,
        ffn=ffn,
        vocab=vocab,
    )


MODELS: dict[str, ModelShape] = {
    model.name: model
    for model in (
        _llama("llama-2-7b", 32, 4096, 32, 32, 11_008, 32_000),
        _llama("llama-3-8b", 32, 4096, 32, 8, 14_336),
        _llama("llama-3-70b", 80, 8192, 64, 8, 28_672),
        _llama("llama-3-405b", 126, 16_384, 128, 8, 53_248),
    )
}
"""Shapes from the models' own config files."""
