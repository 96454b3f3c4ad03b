"""A Llama-style decoder in plain torch. Parameter names are Hugging Face's, so an export renames nothing.

Shapes: B batch, T time, D model width, H query heads, K key/value heads, C head size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytide.core.train_spec import ModelSpec

IGNORE = -100
"""The target of a position that does not count."""
INIT_STD = 0.02


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = spec.heads, spec.n_kv_heads, spec.head_dim
        self.q_proj = nn.Linear(spec.dim, spec.heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(spec.dim, self.kv_heads * spec.head_dim, bias=False)
        self.v_proj = nn.Linear(spec.dim, self.kv_heads * spec.head_dim, bias=False)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, spec.dim, bias=False)

    def forward(self, x_BTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
        b, t, _ = x_BTD.shape
        q_BHTC = self.q_proj(x_BTD).view(b, t, self.heads, self.head_dim).transpose(1, 2)
        k_BKTC = self.k_proj(x_BTD).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        v_BKTC = self.v_proj(x_BTD).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        out_BHTC = F.scaled_dot_product_attention(
            rotate(q_BHTC, cos_TC, sin_TC),
            rotate(k_BKTC, cos_TC, sin_TC),
            v_BKTC,
            is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
        )
        out: Tensor = self.o_proj(out_BHTC.transpose(1, 2).reshape(b, t, -1))
        return out


class Mlp(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.dim, spec.n_ffn, bias=False)
        self.up_proj = nn.Linear(spec.dim, spec.n_ffn, bias=False)
        self.down_proj = nn.Linear(spec.n_ffn, spec.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return out


class Layer(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.mlp = Mlp(spec)

    def forward(self, x_BTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_TC, sin_TC)
        out: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return out


class Decoder(nn.Module):
    def __init__(self, spec: ModelSpec, vocab_size: int) -> None:
        super().__init__()
        self.head_dim, self.theta = spec.head_dim, spec.rope_theta
        self.embed_tokens = nn.Embedding(vocab_size, spec.dim)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.layers))
        self.norm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.embed_tokens(ids_BT)
        cos_TC, sin_TC = rope(ids_BT.shape[1], self.head_dim, self.theta, x_BTD)
        for layer in self.layers:
            x_BTD = layer(x_BTD, cos_TC, sin_TC)
        out: Tensor = self.norm(x_BTD)
        return out


class Llama(nn.Module):
    """Ids to logits. With tied embeddings there is no `lm_head` parameter: the embedding's matrix does its work."""

    def __init__(self, spec: ModelSpec, vocab_size: int) -> None:
        super().__init__()
        self.model = Decoder(spec, vocab_size)
        self.lm_head = None if spec.tie_embeddings else nn.Linear(spec.dim, vocab_size, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.model(ids_BT)
        return F.linear(x_BTD, self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight)


def loss_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """The summed cross entropy in fp32 over targets that are not IGNORE; the caller divides by the global count."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), ignore_index=IGNORE, reduction="sum")


def rope(length: int, head_dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, C] in the two-halves layout of Hugging Face, computed in fp32, cast to `like`."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=like.device) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=like.device), inverse).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos_TC + torch.cat((-second, first), dim=-1) * sin_TC
