"""The decoder of all supported model families, over a flat batch of tokens and a paged KV cache. It is built from the
operators of `raytide.kernels`. `Architecture` describes a family, so there is no class for each family.

For shape suffixes see `kernels/core.py`. In addition: N hidden size, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from raytide.actors.engine.model.input_batch import StepInputs
from raytide.actors.engine.model.layer_stream import StreamedLayers, load_layers
from raytide.actors.engine.model.lora import LoraRows
from raytide.actors.engine.model.vision.encoder import VisionEncoder
from raytide.actors.engine.model.weight_loader import QuantizedOptions, WeightLoader
from raytide.actors.models.architecture import Architecture
from raytide.actors.models.components.rope import cos_sin
from raytide.actors.models.quantized.model_weights import ModelWeights
from raytide.core.errors import ConfigError
from raytide.kernels.core import AttentionSpec, LayerWeights, Linear, PagedBatch, Rope, SparseFfn
from raytide.kernels.device import in_huge_pages
from raytide.kernels.ref import SCALE_BYTES
from raytide.kernels.registry import Ops

if TYPE_CHECKING:
    from raytide.kernels.layers import PassInOneCall

Tensor = torch.Tensor
Layers = list[LayerWeights] | StreamedLayers


class PagedDecoder:
    """A model's weights and forward pass. It keeps no state between calls; the caller holds the KV cache."""

    def __init__(
        self,
        arch: Architecture,
        weights: ModelWeights,
        ops: Ops,
        max_len: int,
        options: QuantizedOptions,
        weights_bytes: int | None = None,
        layers: range | None = None,
    ) -> None:
        """Loads the weights of all layers, or only of `layers`; the embedding and the head come with layer 0.

        With `weights_bytes`, layers that do not fit into that memory are read from the files in every pass. Raises
        ConfigError if even this needs more memory.
        """
        self.arch, self._ops, self._rounds_kv = arch, ops, options.rounds_kv
        self._own_layers = range(arch.num_layers) if layers is None else layers
        self._is_whole, is_first = layers is None, self._own_layers.start == 0
        build = WeightLoader(arch, weights, ops, options)
        self._norm = build.final_norm()
        self._embedding = build.embedding() if is_first else self._norm.weight.new_empty(0, arch.hidden_size)
        self._lookup: Callable[[Tensor], Tensor] = lambda ids_T: self._embedding.index_select(0, ids_T)
        self._positions = build.positions() if is_first else None
        self._layers: Layers
        if weights_bytes is not None and arch.vision is not None:
            raise ConfigError("a model that reads images keeps its weights.", hint="Leave weights_memory_gb out.")
        if weights_bytes is None:
            self._layers = [build.layer(index) for index in self._own_layers]
        else:
            self._layers = load_layers(build, arch.num_layers, weights_bytes, embedding_bytes=self._embedding.nbytes)
        self._head: Linear = build.head(self._embedding) if is_first else _no_head
        self.vision = None if arch.vision is None else VisionEncoder(arch.vision, arch.hidden_size, weights)
        if layers is None:
            build.check_all_read()
        self.quantization = build.quantization
        # Rounded as transformers rounds it.
        self._embedding_scale = self._embedding.new_tensor(arch.embedding_scale).item()
        self._ropes = [tuple(each.to(self._embedding) for each in cos_sin(spec, max_len)) for spec in arch.ropes]
        specs = [AttentionSpec(each.attention_scale, each.window, arch.attention_softcap) for each in arch.layers]
        self._attentions = list(dict.fromkeys(specs))
        self._attention_of = [self._attentions.index(spec) for spec in specs]
        self._in_one_call = self._pass_in_one_call()

    def new_cache(self, num_blocks: int, block_size: int) -> list[Tensor]:
        """Returns one zeroed KV tensor per layer: [2, S, K, D], or [2, S, K, D + 4] for int8. The tensors must be
        finite because padding is multiplied by 0, and 0 times NaN is NaN.
        """
        dtype = torch.int8 if self._rounds_kv else self._embedding.dtype
        width = self.arch.head_dim + (SCALE_BYTES if self._rounds_kv else 0)
        shape = (2, num_blocks * block_size, self.arch.num_kv_heads, width)
        return [in_huge_pages(self._embedding.new_empty(shape, dtype=dtype)).zero_() for _ in self._own_layers]

    def discard(self) -> None:
        """Frees the parts of these weights that other processes hold. The weights must not be in use."""

    @property
    def streamed_layers(self) -> int:
        """The number of layers that are read from the files in every pass."""
        return self._layers.num_streamed if isinstance(self._layers, StreamedLayers) else 0

    @torch.inference_mode()
    def forward(self, step: StepInputs, cache: list[Tensor]) -> Tensor:
        """Writes the KV of all tokens. Returns float32 logits [R, V], one row for each token in `step.rows_R`."""
        whole = self._in_one_call
        if whole is None or not whole.has_head or step.loras is not None:
            return self.head(self.hidden(step, cache))
        entered, rows_R = self._entered(step), step.rows_R
        return self._capped(whole(entered, step.positions_T, rows_R, step.batch, cache, head=True))

    @torch.inference_mode()
    def head(self, hidden_RN: Tensor) -> Tensor:
        """Returns the float32 logits [R, V] for last hidden states."""
        return self._capped(self._head(hidden_RN).float())

    def _capped(self, logits_RV: Tensor) -> Tensor:
        cap = self.arch.logit_softcap
        return logits_RV if cap is None else cap * torch.tanh(logits_RV / cap)

    @torch.inference_mode()
    def hidden(self, step: StepInputs, cache: list[Tensor]) -> Tensor:
        """Writes the KV of all tokens and returns the normed last hidden states [R, N] of the tokens `step.rows_R`."""
        arch, ops, loras, slots_T = self.arch, self._ops, step.loras, step.batch.slots_T
        one_call = self._in_one_call if loras is None else None
        if one_call is not None and self._is_whole:
            return one_call(self._entered(step), step.positions_T, step.rows_R, step.batch, cache, head=False)
        x_TN, delta_TN = self._enter(step)
        if one_call is not None:
            one_call.layers((x_TN, delta_TN), step.positions_T, step.batch, cache)
            return self._leave(x_TN, delta_TN, step.rows_R)
        attends = [ops.attention(step.batch, spec) for spec in self._attentions]
        ropes = [Rope(cos[step.positions_T], sin[step.positions_T]) for cos, sin in self._ropes]
        heads, all_heads, dim = arch.num_heads, arch.num_heads + 2 * arch.num_kv_heads, arch.head_dim
        for index, (layer, kv) in enumerate(zip(self._layers, cache, strict=True), self._own_layers.start):
            normed_TN = ops.add_norm(x_TN, delta_TN, layer.input_norm)
            qkv_TAD = layer.qkv(normed_TN)
            if loras is not None:
                loras.add(index, "qkv", normed_TN, qkv_TAD)
            qkv_TAD = qkv_TAD.view(-1, all_heads, dim)
            rope = arch.layers[index].rope
            ops.rope_write(qkv_TAD, None if rope is None else ropes[rope], layer.head_norms, kv, slots_T)
            attended = attends[self._attention_of[index]](qkv_TAD[:, :heads], kv).flatten(1)
            delta_TN = layer.attention_out(attended)
            if loras is not None:
                loras.add(index, "attention_out", attended, delta_TN)
            if layer.post_attention_norm is not None:
                delta_TN = ops.norm(delta_TN, layer.post_attention_norm)
            delta_TN = self._feed_forward(index, layer, ops.add_norm(x_TN, delta_TN, layer.ffn_norm), loras)
            if layer.post_ffn_norm is not None:
                delta_TN = ops.norm(delta_TN, layer.post_ffn_norm)
        return self._leave(x_TN, delta_TN, step.rows_R)

    def _pass_in_one_call(self) -> PassInOneCall | None:
        """Returns the forward pass in one call of C; None where that cannot be: on a GPU, with layers that are read
        from files in every pass, with other operators, or with sparse feed-forward layers.
        """
        if self._embedding.device.type != "cpu" or isinstance(self._layers, StreamedLayers):
            return None
        from raytide.kernels.layers import DecoderSpec, pass_in_one_call

        arch, own = self.arch, self._own_layers
        spec = DecoderSpec(
            embedding_VN=self._embedding,
            norm=self._norm,
            head=self._head if self._is_whole else None,
            heads=arch.num_heads,
            kv_heads=arch.num_kv_heads,
            dim=arch.head_dim,
            activation=arch.activation,
            is_gated=arch.gated_ffn,
            ropes=[(cos, sin) for cos, sin in self._ropes],
            attentions=self._attentions,
            rope_of=[arch.layers[index].rope for index in own],
            attention_of=[self._attention_of[index] for index in own],
        )
        return pass_in_one_call(self._ops, self._layers, spec)

    def _entered(self, step: StepInputs) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the tokens' ids if their embeddings are the first layer's input as they are, else that input."""
        is_plain = self._embedding_scale == 1.0 and self._positions is None and step.images is None
        return step.ids_T if is_plain else self._enter(step)

    def _enter(self, step: StepInputs) -> tuple[Tensor, Tensor]:
        """Returns the first layer's input: the residual stream, and the tensor that the layer first adds to it."""
        x_TN = self._embed(step.ids_T, step.positions_T)
        if step.images is not None:
            x_TN[step.images.rows_T] = step.images.features_TN
        return x_TN, torch.zeros_like(x_TN)

    def _leave(self, x_TN: Tensor, delta_TN: Tensor, rows_R: Tensor) -> Tensor:
        """Returns the normed hidden states of the rows `rows_R` after the last layer."""
        # index_select takes a fraction of the time of indexing where there are few rows.
        return self._ops.add_norm(x_TN.index_select(0, rows_R), delta_TN.index_select(0, rows_R), self._norm)

    def _embed(self, ids_T: Tensor, positions_T: Tensor) -> Tensor:
        x_TN = self._lookup(ids_T)
        if self._embedding_scale != 1.0:
            x_TN *= self._embedding_scale
        if self._positions is not None:
            x_TN += self._positions[positions_T]
        return x_TN

    def _feed_forward(self, index: int, layer: LayerWeights, x_TN: Tensor, loras: LoraRows | None) -> Tensor:
        arch, ops = self.arch, self._ops
        if layer.gate_up is None or layer.down is None:
            assert layer.sparse is not None
            return self._choose_experts(layer.sparse, x_TN)
        hidden = layer.gate_up(x_TN)
        if loras is not None:
            loras.add(index, "gate_up", x_TN, hidden)
        hidden = (ops.activate_mul if arch.gated_ffn else ops.activate)(hidden, arch.activation)
        out_TN = layer.down(hidden)
        if loras is not None:
            loras.add(index, "down", hidden, out_TN)
        return out_TN

    def _choose_experts(self, ffn: SparseFfn, x_TN: Tensor) -> Tensor:
        assert self.arch.experts is not None
        likely = ffn.router(x_TN).float().softmax(-1).topk(self.arch.experts.per_token)
        weights_TX = likely.values
        if self.arch.experts.renormalize:
            weights_TX = weights_TX / weights_TX.sum(-1, keepdim=True)
        return ffn.experts(x_TN, likely.indices, weights_TX)


def _no_head(hidden_RN: Tensor) -> Tensor:
    raise AssertionError("a stage behind the first has no head")


def prompt_logits(model: PagedDecoder, tokens: list[int], block_size: int, device: torch.device) -> torch.Tensor:
    """Returns float32 logits [T, V] for every position of a prompt, for tests and comparisons. Row t predicts the token
    after the first t + 1 tokens.

    The prompt is computed in one pass with temporary KV, outside the scheduler. Running sequences wait meanwhile.
    """
    blocks = -(-len(tokens) // block_size)
    positions_T = torch.arange(len(tokens), device=device)
    batch = PagedBatch(
        query_lens=[len(tokens)],
        context_lens=[len(tokens)],
        block_tables_BM=torch.arange(blocks, device=device)[None],
        slots_T=positions_T,
        block_size=block_size,
    )
    cache = model.new_cache(blocks, block_size)
    step = StepInputs(torch.tensor(tokens, device=device), positions_T, batch, rows_R=positions_T)
    return model.forward(step, cache)
