"""The trainable decoder of every supported model family, configured by `Architecture`.

Parameter names are raytide's own and the same for all families (`layers.3.attention.q_proj.weight`).
`hf/weight_mapping.py` maps them to Hugging Face's names. A pipeline stage is a Transformer with some of the layers,
under the same names.

Shapes: B batch, T time, D model width, H query heads, K key/value heads, C head size, F feed-forward width, V
vocabulary, N tokens, E experts, X experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytide.actors.models.architecture import Architecture, LayerSpec
from raytide.actors.models.components.experts import Experts
from raytide.actors.models.components.rope import cos_sin
from raytide.actors.trainer.model.attention import attend
from raytide.actors.trainer.model.loss import Routing, load_balancing_loss, loss_sum
from raytide.kernels.core import Activation, AttentionSpec

Attend = Callable[[Tensor, Tensor, Tensor, AttentionSpec, Tensor | None], Tensor]
Loss = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]
Rotation = tuple[Tensor, Tensor]
"""Cosines and sines that rotate the first R numbers of each head: [T, R], or [B, 1, T, R] if rows hold documents."""


class Normalization(nn.Module):
    """RMS norm or layer norm over the last dimension. The factor is weight + `offset`. Gemma's offset is 1."""

    def __init__(self, size: int, arch: Architecture, *, kind: str | None = None) -> None:
        super().__init__()
        self.eps, self.offset = arch.norm_eps, arch.norm_offset
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if (kind or arch.norm_kind) == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.offset if self.offset else self.weight
        if self.bias is not None:
            return F.layer_norm(x, x.shape[-1:], weight, self.bias, self.eps)
        return F.rms_norm(x, x.shape[-1:], weight, self.eps)


class Attention(nn.Module):
    def __init__(self, arch: Architecture, layer: LayerSpec) -> None:
        super().__init__()
        width, dim, kv_width = arch.hidden_size, arch.head_dim, arch.num_kv_heads * arch.head_dim
        self.head_dim = dim
        self.spec = AttentionSpec(layer.attention_scale, layer.window, arch.attention_softcap)
        self.attend: Attend = attend
        """q_BHTC, k_BKTC, v_BKTC, spec, documents_BT -> out_BHTC. Context parallelism replaces it."""
        self.q_proj = nn.Linear(width, arch.num_heads * dim, bias=arch.qkv_bias)
        self.k_proj = nn.Linear(width, kv_width, bias=arch.qkv_bias)
        self.v_proj = nn.Linear(width, kv_width, bias=arch.qkv_bias)
        self.q_norm = Normalization(dim, arch, kind="rms") if arch.head_norms else None
        self.k_norm = Normalization(dim, arch, kind="rms") if arch.head_norms else None
        self.o_proj = nn.Linear(arch.num_heads * dim, width, bias=arch.attention_out_bias)

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, documents_BT: Tensor | None = None) -> Tensor:
        q_BHTC, k_BKTC, v_BKTC = (  # as many heads as this rank has
            linear(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_BHTC, k_BKTC = self.q_norm(q_BHTC), self.k_norm(k_BKTC)
        if rotation is not None:
            q_BHTC, k_BKTC = rotate(q_BHTC, rotation), rotate(k_BKTC, rotation)
        out_BHTC = self.attend(q_BHTC, k_BKTC, v_BKTC, self.spec, documents_BT)
        out: Tensor = self.o_proj(out_BHTC.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        width, ffn, bias = arch.hidden_size, arch.ffn_size, arch.ffn_bias
        self.activation = arch.activation
        self.gate_proj = nn.Linear(width, ffn, bias=bias) if arch.gated_ffn else None
        self.up_proj = nn.Linear(width, ffn, bias=bias)
        self.down_proj = nn.Linear(ffn, width, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.gate_proj is None:
            hidden = activate(self.up_proj(x_BTD), self.activation)
        else:
            hidden = activate(self.gate_proj(x_BTD), self.activation) * self.up_proj(x_BTD)
        out: Tensor = self.down_proj(hidden)
        return out


class SparseFeedForward(nn.Module):
    """A mixture of experts. Routes each token to its most likely experts, and weights the experts' outputs by the
    router's probabilities.
    """

    def __init__(self, arch: Architecture, experts: Experts) -> None:
        super().__init__()
        self.activation, self.experts = arch.activation, experts
        self.routing: Routing | None = None
        """Routing of the last batch, if the router is balanced."""
        count, ffn, width = experts.count, experts.ffn_size, arch.hidden_size
        self.router = nn.Linear(width, count, bias=False)
        self.gate_proj = nn.Parameter(torch.empty(count, ffn, width))
        self.up_proj = nn.Parameter(torch.empty(count, ffn, width))
        self.down_proj = nn.Parameter(torch.empty(count, width, ffn))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.flatten(0, -2)
        probabilities_NE = self.router(x_ND).float().softmax(-1)
        top = probabilities_NE.topk(self.experts.per_token)
        if self.experts.balance:
            self.routing = Routing(probabilities_NE, top.indices)
        weights_NX = top.values
        if self.experts.renormalize:
            weights_NX = weights_NX / weights_NX.sum(-1, keepdim=True)
        out_ND = torch.zeros_like(x_ND)
        for expert in range(self.experts.count):
            rows, slot = (top.indices == expert).nonzero(as_tuple=True)
            gate, up, down = self.gate_proj[expert], self.up_proj[expert], self.down_proj[expert]
            x = x_ND[rows]
            hidden = activate(F.linear(x, gate), self.activation) * F.linear(x, up)
            out_ND = out_ND.index_add(0, rows, F.linear(hidden, down) * weights_NX[rows, slot, None].to(x.dtype))
        return out_ND.view_as(x_BTD)


class TransformerBlock(nn.Module):
    def __init__(self, arch: Architecture, index: int) -> None:
        super().__init__()
        spec, width = arch.layers[index], arch.hidden_size
        self.rope = spec.rope
        self.input_norm = Normalization(width, arch)
        self.attention = Attention(arch, spec)
        self.post_attention_norm = Normalization(width, arch) if arch.post_norms else None
        self.ffn_norm = Normalization(width, arch)
        sparse = arch.experts if spec.sparse else None
        self.ffn = FeedForward(arch) if sparse is None else SparseFeedForward(arch, sparse)
        self.post_ffn_norm = Normalization(width, arch) if arch.post_norms else None

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, documents_BT: Tensor | None = None) -> Tensor:
        attended = self.attention(self.input_norm(x_BTD), rotation, documents_BT)
        x_BTD = x_BTD + (attended if self.post_attention_norm is None else self.post_attention_norm(attended))
        fed = self.ffn(self.ffn_norm(x_BTD))
        out: Tensor = x_BTD + (fed if self.post_ffn_norm is None else self.post_ffn_norm(fed))
        return out


class Transformer(nn.Module):
    """A whole model, or the part of it that a pipeline stage has. A whole model maps token ids to logits or, if targets
    are given, to the summed loss. With tied embeddings there is no `head`.

    `layers` are the indices of this part's layers. None means all layers. The first part embeds token ids. The last
    part normalizes and predicts. A part in the middle maps hidden states to hidden states.
    """

    def __init__(self, arch: Architecture, max_len: int, layers: Sequence[int] | None = None) -> None:
        super().__init__()
        self.arch, self.max_len = arch, max_len
        indices = range(arch.num_layers) if layers is None else layers
        self.is_first, self.is_last = 0 in indices, arch.num_layers - 1 in indices
        width, vocab = arch.hidden_size, arch.vocab_size
        embeds = self.is_first or (self.is_last and arch.tied_embeddings)
        self.embedding = nn.Embedding(vocab, width) if embeds else None
        learned = arch.learned_positions and self.is_first
        self.positions = nn.Embedding(arch.max_model_len, width) if learned else None
        self.layers = nn.ModuleDict({str(index): TransformerBlock(arch, index) for index in indices})
        self.norm = Normalization(width, arch) if self.is_last else None
        self.head = nn.Linear(width, vocab, bias=False) if self.is_last and not arch.tied_embeddings else None
        self.balance = 0.0 if arch.experts is None else arch.experts.balance
        self.at_T: Tensor | None = None
        """Positions of the tokens that attention sees on this rank; None for all from 0."""
        self.loss: Loss = loss_sum
        """The loss function. Tensor parallelism and the memory option `loss_chunk` replace it."""
        self._tables: list[Rotation] | None = None

    def forward(self, x: Tensor, targets_BT: Tensor | None = None, documents_BT: Tensor | None = None) -> Tensor:
        """Computes this part of the model. The input `x` is token ids [B, T] for the first part, and hidden states [B,
        T, D] for later parts.

        The last part returns the summed loss if there are targets, else logits [B, T, V]. Other parts return hidden
        states [B, T, D].

        `documents_BT` has the document number of each token. It covers whole rows, even if this rank has only a part of
        each row. Attention stays inside documents, and positions restart with each document.
        """
        token_positions = torch.arange(x.shape[1], device=x.device) if self.at_T is None else self.at_T
        if documents_BT is not None:
            in_document_BT = positions_in_documents(documents_BT)
            token_positions = in_document_BT if self.at_T is None else in_document_BT[:, self.at_T]
        x_BTD = self._embed(x, token_positions) if self.is_first else x
        rotations = self._rotations(token_positions, x_BTD)
        for layer in self.layers.values():
            assert isinstance(layer.rope, int | None)
            rotation = None if layer.rope is None else rotations[layer.rope]
            x_BTD = layer(x_BTD, rotation) if documents_BT is None else layer(x_BTD, rotation, documents_BT)
        if self.norm is None:
            return x_BTD
        x_BTD, cap = self.norm(x_BTD), self.arch.logit_softcap
        if targets_BT is not None:
            return self.with_balance(self.loss(x_BTD, self.head_weight, targets_BT, cap), targets_BT)
        logits_BTV = F.linear(x_BTD, self.head_weight)
        return logits_BTV if cap is None else cap * torch.tanh(logits_BTV / cap)

    def with_balance(self, loss: Tensor, targets_BT: Tensor) -> Tensor:
        """Returns the loss of the last forward pass plus the routers' load-balancing loss, if routers are balanced."""
        if self.balance == 0:
            return loss
        return loss + self.balance * load_balancing_loss(self._routings(), targets_BT)

    @property
    def head_weight(self) -> Tensor:
        """The matrix [V, D] with which the last part computes logits."""
        head = self.embedding if self.head is None else self.head
        assert head is not None
        return head.weight

    def _routings(self) -> list[Routing]:
        """Returns the layers' routings and clears them, so that no graph outlives its step."""
        found = []
        for layer in self.layers.values():
            ffn = layer.ffn
            if isinstance(ffn, SparseFeedForward) and ffn.routing is not None:
                found.append(ffn.routing)
                ffn.routing = None
        return found

    def _embed(self, ids_BT: Tensor, at: Tensor) -> Tensor:
        assert self.embedding is not None
        x_BTD: Tensor = self.embedding(ids_BT)
        if self.arch.embedding_scale != 1.0:
            x_BTD = x_BTD * torch.tensor(
                self.arch.embedding_scale, dtype=x_BTD.dtype
            )  # rounded to the dtype, as Gemma does
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(at)
        return x_BTD

    def _rotations(self, at: Tensor, like: Tensor) -> list[Rotation]:
        """Returns cosines and sines for the positions `at`: [T], counted from 0 unless `at_T` is set, or [B, T]."""
        length = at.shape[-1]
        if self._tables is None or (self.at_T is None and length > self.max_len):
            self.max_len = max(self.max_len, length)
            made = [cos_sin(spec, self.max_len) for spec in self.arch.ropes]
            self._tables = [(cos.to(like.device), sin.to(like.device)) for cos, sin in made]
        by_row = at.ndim == 2
        rows: Tensor | slice = at if by_row or self.at_T is not None else slice(length)
        found = [(cos[rows].to(like.dtype), sin[rows].to(like.dtype)) for cos, sin in self._tables]
        return [(cos[:, None], sin[:, None]) for cos, sin in found] if by_row else found


def positions_in_documents(documents_BT: Tensor) -> Tensor:
    """Returns the position of each token in its document, as a tensor [B, T]. Positions are counted from 0.
    Neighbouring tokens with equal document numbers belong to one document.
    """
    at_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    starts_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    starts_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    out: Tensor = at_T - (at_T * starts_BT).cummax(1).values
    return out


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Applies rotary position embeddings to the first R numbers of each head in `x`, and returns the result. Numbers i
    and i + R/2 form a pair, as in Hugging Face's layout. The caller must have negated the first half of the sines.
    """
    cos, sin = rotation
    rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((second, first), dim=-1) * sin
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def activate(x: Tensor, kind: Activation) -> Tensor:
    if kind == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
