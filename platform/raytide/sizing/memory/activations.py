"""The bytes of activations that one layer keeps for its backward pass, counted tensor by tensor.

The counts are of the tensors that autograd saves in `actors/trainer/model/transformer.py`; a test compares them with
those really saved. Symbols: h width, q = heads * head_dim, k = kv_heads * head_dim, a heads, f feed-forward width. All
are divided by the tensor axis t, the sequence also by the context axis.
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
        """The number of tokens that attention and feed-forward compute: those of all tensor ranks together."""
        return self.sequences * self.seq_len // self.context

    @property
    def own_tokens(self) -> float:
        """The number of this rank's tokens in the residual stream, which is divided among the tensor ranks."""
        return self.tokens / self.tensor


def layer_bytes(model: ModelShape, part: Slice, *, sparse: bool = False) -> float:
    """Returns the bytes that one layer saves without checkpointing."""
    norms = (4 if model.post_norms else 2) * stream_norm_bytes(model, part) * part.own_tokens
    inputs = 2 * part.bytes_each * model.width * part.tokens
    return norms + inputs + attention_bytes(model, part) + (sparse_bytes if sparse else ffn_bytes)(model, part)


def norm_bytes(size: int, part: Slice) -> float:
    """Returns the bytes per token of a norm's saved input and statistics.

    On a CPU the input and its normalized form are saved, both in fp32: as copies if computation is in 16 bits.
    """
    return (2 * FLOAT * size if part.on_cpu else part.bytes_each * size) + FLOAT


def stream_norm_bytes(model: ModelShape, part: Slice) -> float:
    """Returns the bytes per token of a norm of the residual stream. LayerNorm keeps its input and two statistics."""
    if model.layer_norms:
        return part.bytes_each * model.width + 2 * FLOAT
    return norm_bytes(model.width, part)


def attention_bytes(model: ModelShape, part: Slice) -> float:
    """Returns the bytes of q, k, v, the output and the log-sum-exp.

    With a context axis these include the keys and values of whole sequences, the joined output, and the masks of pieces
    that do not begin at the first key.
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
    """Returns the bytes of the gate, its activation, the up projection, and their product; without a gate, of the up
    projection and its activation.
    """
    return (4 if model.gated else 2) * part.tokens * part.bytes_each * model.ffn / part.tensor


def sparse_bytes(model: ModelShape, part: Slice) -> float:
    """Returns the bytes of the router's probabilities, and for each expert of a token: the input, four tensors of the
    expert's width, the output, and the indices that gather them.
    """
    routed = part.tokens * model.experts_per_token
    values = part.bytes_each * (4 * model.expert_ffn / part.tensor + 2 * model.width)
    return routed * (values + 3 * _IDS) + part.tokens * 2 * FLOAT * model.experts


def checkpoint_bytes(model: ModelShape, part: Slice, memory: MemorySpec, *, sparse: bool = False) -> float:
    """Returns the bytes that a layer keeps with activation checkpointing: its input, and with `selective` also the
    results of matrix products and of attention.
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
    """Returns the bytes of the token ids, and of the cosines and sines of one rotary embedding."""
    tables = 0 if model.positions else 2 * part.bytes_each * part.seq_len * model.head_dim
    return _IDS * part.tokens + tables


def last_bytes(model: ModelShape, part: Slice, loss_chunk: int) -> tuple[float, float]:
    """Returns (kept, extra): the bytes that the last norm and the loss keep until the backward pass, and the most bytes
    that they need in addition while they run.

    Without chunks the log-probabilities of all tokens are kept in fp32. In addition the forward pass needs the logits
    in the compute dtype and in fp32, and the backward pass needs their gradient. With chunks the gradients of the last
    hidden states and of the head are kept instead.
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
