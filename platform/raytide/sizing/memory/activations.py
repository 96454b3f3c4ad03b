"""The bytes of activations that one layer keeps for the backward pass, counted tensor by tensor.

The counted tensors are those that autograd saves in `actors/trainer/model/transformer.py`. A test compares the counts
with real runs. Symbols: `h` is the width, `q` = heads * head_dim, `k` = kv_heads * head_dim, `a` is the number of
heads, and `f` is the feed-forward width. All of them are divided by the size `t` of the tensor axis. The sequence is
divided by the size of the context axis as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from raytide.core.specs.train import MemorySpec
from raytide.sizing.model_shape import ModelShape

FLOAT = 4
_IDS = 8


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a micro-batch that one rank computes."""

    sequences: int
    seq_len: int
    """The length of whole sequences, before the context axis divides them."""
    tensor: int = 1
    context: int = 1
    bytes_each: int = 2
    on_cpu: bool = False
    """True on CPUs, where norms keep two fp32 tensors of their size; CUDA's fused norm keeps only its input."""

    @property
    def tokens(self) -> int:
        """The number of tokens that this rank processes in attention and feed-forward. It includes the tokens that the
        other tensor ranks hold in the residual stream.
        """
        return self.sequences * self.seq_len // self.context

    @property
    def own_tokens(self) -> float:
        """The number of this rank's tokens in the residual stream. The residual stream is divided among the tensor
        ranks.
        """
        return self.tokens / self.tensor


def layer_bytes(model: ModelShape, part: Slice, *, sparse: bool = False) -> float:
    """Returns the bytes of activations that one layer saves without checkpointing."""
    norms = (4 if model.post_norms else 2) * stream_norm_bytes(model, part) * part.own_tokens
    inputs = 2 * part.bytes_each * model.width * part.tokens
    return norms + inputs + attention_bytes(model, part) + (sparse_bytes if sparse else ffn_bytes)(model, part)


def norm_bytes(size: int, part: Slice) -> float:
    """Returns the bytes per token that a norm saves: its input and its statistics.

    On a CPU, the norm also saves the normalized input. The input and the normalized input are then in fp32.
    """
    return (2 * FLOAT * size if part.on_cpu else part.bytes_each * size) + FLOAT


def stream_norm_bytes(model: ModelShape, part: Slice) -> float:
    """Returns the bytes per token that a norm of the residual stream saves. LayerNorm saves its input and two
    statistics.
    """
    if model.layer_norms:
        return part.bytes_each * model.width + 2 * FLOAT
    return norm_bytes(model.width, part)


def attention_bytes(model: ModelShape, part: Slice) -> float:
    """Returns the bytes of q, k, v, the output and the log-sum-exp of attention.

    With a context axis they include three more parts: the keys and values of whole sequences, the joined output of
    this rank's pieces, and the masks of the query pieces that start after the first key.
    """
    q = model.attention_width / part.tensor
    kv_heads = model.kv_heads / part.tensor if model.kv_heads % part.tensor == 0 else 1
    kv = 2 * kv_heads * model.head_dim
    a_token = part.bytes_each * 2 * q + FLOAT * model.heads / part.tensor
    found = part.tokens * a_token + part.tokens * part.context * part.bytes_each * kv
    if part.context > 1:
        piece = part.seq_len // (2 * part.context)
        masks = piece * piece * (2 * part.context + 1)
        found += part.tokens * part.bytes_each * q + part.bytes_each * masks
    if model.head_norms:
        per_value = (norm_bytes(model.head_dim, part)) / model.head_dim
        found += part.tokens * per_value * (q + kv / 2)
    return found


def ffn_bytes(model: ModelShape, part: Slice) -> float:
    """Returns the bytes that a dense feed-forward keeps for the backward pass. With a gate it keeps four tensors:
    `gate`, `silu(gate)`, `up`, and their product. Without a gate it keeps two: `up` and its activation.
    """
    return (4 if model.gated else 2) * part.tokens * part.bytes_each * model.ffn / part.tensor


def sparse_bytes(model: ModelShape, part: Slice) -> float:
    """Returns the bytes that a layer with experts keeps for the backward pass.

    The layer keeps the router's probabilities. For each expert to which a token is routed, it also keeps the input,
    four tensors of the expert's width, the output, and the gather indices.
    """
    routed = part.tokens * model.experts_per_token
    values = part.bytes_each * (4 * model.expert_ffn / part.tensor + 2 * model.width)
    return routed * (values + 3 * _IDS) + part.tokens * 2 * FLOAT * model.experts


def checkpoint_bytes(model: ModelShape, part: Slice, memory: MemorySpec, *, sparse: bool = False) -> float:
    """Returns the bytes that one layer keeps under the chosen activation checkpointing:

    - `none`: everything that `layer_bytes` counts.
    - `full`: the layer's input.
    - `selective`: the layer's input, and the results of matrix products and of attention.
    """
    if memory.checkpointing == "none":
        return layer_bytes(model, part, sparse=sparse)
    kept = part.bytes_each * model.width * part.own_tokens
    if memory.checkpointing == "full":
        return kept
    q = model.attention_width / part.tensor
    kv = 2 * model.kv_width / part.tensor if model.kv_heads % part.tensor == 0 else 2 * model.head_dim
    ffn = model.expert_ffn * model.experts_per_token if sparse else model.ffn
    products = q + kv + model.width + (2 if model.gated else 1) * ffn / part.tensor + model.width
    attention = part.bytes_each * q + FLOAT * model.heads / part.tensor
    return kept + part.tokens * (part.bytes_each * products + attention)


def first_bytes(model: ModelShape, part: Slice) -> float:
    """Returns the bytes of the token ids and of one rotary embedding's cosines and sines."""
    tables = 0 if model.positions else 2 * part.bytes_each * part.seq_len * model.head_dim
    return _IDS * part.tokens + tables


def last_bytes(model: ModelShape, part: Slice, loss_chunk: int) -> tuple[float, float]:
    """Returns (kept, extra) for the last norm and the loss. `kept` is the bytes that stay until the backward pass.
    `extra` is the most bytes that are needed in addition while the loss and its gradient are computed.

    Without chunks, the log-probabilities of all tokens are kept in fp32. In addition, the forward pass needs the logits
    in the compute dtype and in fp32, and the backward pass needs the gradient of the logits. With chunks, the gradients
    of the last hidden states and of the head are kept instead.
    """
    tokens = part.tokens
    norm = stream_norm_bytes(model, part) * part.own_tokens + _IDS * tokens
    vocab = model.vocab / part.tensor if model.vocab % part.tensor == 0 else model.vocab
    rows = tokens if model.vocab % part.tensor == 0 else part.own_tokens
    hidden = part.bytes_each * model.width * rows
    casts = 0 if part.bytes_each == FLOAT else part.bytes_each
    if loss_chunk and part.tensor == 1:
        head = vocab * model.width
        chunk = min(loss_chunk, tokens) * vocab * (2 * FLOAT + 2 * casts)
        return norm + hidden + part.bytes_each * head, chunk + FLOAT * head
    return norm + hidden + FLOAT * rows * vocab, (FLOAT + casts) * rows * vocab
