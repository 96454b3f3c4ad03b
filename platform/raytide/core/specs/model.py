"""The specifications of the model, of finetuning and of chat data. The module does not import torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, StringConstraints, model_validator

from raytide.core.config import Config

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class ModelSpec(Config):
    """The specification of a model: a Llama-style decoder given by a few numbers, or any supported model family given
    by a Hugging Face config."""

    config: str | dict[str, JsonValue] | None = None
    """A `config.json` (its path or directory) or its contents, in place of the numbers below. With `init_from`, the
    fields that override those of its config.
    """
    vocab_size: int | None = Field(default=None, ge=2)
    """The vocabulary size; by default the dataset's."""
    dim: int = Field(default=256, ge=2)
    layers: int = Field(default=6, ge=1)
    heads: int = Field(default=8, ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    """The number of key and value heads; equal to `heads` by default. Fewer make grouped-query attention."""
    ffn_dim: int | None = Field(default=None, ge=1)
    """The width of the feed-forward layer; by default 8/3 of `dim`, rounded up to a multiple of 64."""
    max_seq_len: int = Field(default=1024, ge=1)
    rope_theta: float = Field(default=10000.0, gt=0)
    norm_eps: float = Field(default=1e-5, gt=0)
    tie_embeddings: bool = True

    @model_validator(mode="after")
    def _one_form(self) -> ModelSpec:
        numbers = sorted(self.numbers)
        if self.config is not None and numbers:
            raise ValueError(f"{', '.join(numbers)} cannot be combined with config")
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(f"dim {self.dim} divided by heads {self.heads} must be an even number")
        if self.heads % self.n_kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.n_kv_heads}")
        return self

    @property
    def numbers(self) -> frozenset[str]:
        """The names of the numeric fields that differ from their defaults."""
        return frozenset(name for name in self.model_fields_set - {"config"} if getattr(self, name) != _default(name))

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def n_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def n_ffn(self) -> int:
        return self.ffn_dim if self.ffn_dim is not None else -(-self.dim * 8 // 3 // 64) * 64

    def hf_config(self, vocab_size: int, eos_id: int) -> dict[str, object]:
        """Returns the `config.json` of a LlamaForCausalLM with this spec's numbers. The eos token separates documents,
        so it serves as the bos token as well."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size or vocab_size,
            "hidden_size": self.dim,
            "intermediate_size": self.n_ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_seq_len,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_embeddings,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "initializer_range": 0.02,
            "bos_token_id": eos_id,
            "eos_token_id": eos_id,
            "use_cache": True,
        }


class LoraSpec(Config):
    """Low-rank adapters (Hu et al. 2021). The model's own weights stay frozen."""

    rank: int = Field(default=8, ge=1, le=256)
    alpha: float = Field(default=16.0, gt=0)
    """The factor alpha: the adapter's output is scaled by alpha / rank."""
    targets: tuple[Target, ...] | None = Field(default=None, min_length=1)
    """The projections with adapters; by default all, but only those of attention in a model with experts."""


class FinetuneSpec(Config):
    lora: LoraSpec


class QuantizationOptions(Config):
    """The options that are common to all quantisations of weights."""

    scheme: Literal["w8a16", "w8a8", "w4a16", "fp8"] = "w4a16"
    group: int | None = Field(default=None, ge=8, le=4096)
    """The number of inputs that share a scale. By default, all inputs of an output share one for 8 bits, and 32 do for
    w4a16.
    """
    symmetric: bool = True
    """True for scales without zero points. With zero points, w4a16 loses less quality and is a little slower."""
    skip: tuple[Annotated[str, StringConstraints(min_length=1, max_length=200)], ...] = Field(default=(), max_length=64)
    """Names of linear layers that are not quantised, with `*` as a wildcard: `*.down_proj`. The head and the embeddings
    never are.
    """

    @property
    def bits(self) -> Literal[4, 8]:
        return 4 if self.scheme == "w4a16" else 8

    @property
    def group_size(self) -> int | None:
        """The number of inputs that share a scale. None if all inputs of an output share one scale."""
        return 32 if self.group is None and self.scheme == "w4a16" else self.group


class QatSpec(QuantizationOptions):
    """Quantisation-aware training: linear layers compute with rounded weights. The `rtn` step of a compression recipe
    later rounds the weights in the same way."""

    scheme: Literal["w8a16", "w4a16"] = "w4a16"
    """The scheme: integer weights of 8 or 4 bits, as in a recipe's `rtn`."""
    activations: Literal["none", "int8"] = "none"
    """The rounding of these layers' inputs: `int8` rounds them in groups of 32, as the engine's `quantized_input: int8`
    does.
    """
    start_step: int = Field(default=0, ge=0)
    """The number of ordinary training steps before the quantisation-aware ones."""


class ChatSpec(Config):
    """Chat data: one JSON line for each conversation, `{"messages": [{"role": ..., "content": ...}, ...]}`.

    The loss covers only the assistant's messages. A conversation longer than seq_len is truncated at its end.
    """

    file: str
    """The file, as a path or an fsspec URL."""
    tokenizer: str | None = None
    """The directory of `tokenizer.json` and the chat template; by default `init_from`'s."""
    template: str | None = None
    """A file with a jinja2 chat template, in place of the tokenizer's. The exported model gets it too."""


def _default(name: str) -> object:
    return ModelSpec.model_fields[name].default


class DistillSpec(Config):
    """Distillation: the targets are a teacher model's predictions, not the next tokens."""

    teacher: str = Field(min_length=1)
    """A Hugging Face directory of a model with the same vocabulary. Every rank loads all of it."""
    loss: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """The divergence to minimise: `forward_kl` is KL(teacher | student), which covers everything that the teacher
    predicts; `reverse_kl` is KL(student | teacher), which concentrates on the teacher's likeliest predictions; `jsd` is
    between both.
    """
    beta: float = Field(default=0.5, gt=0, lt=1)
    """For `jsd`: the teacher's weight in the mixture with which both models are compared."""
    temperature: float = Field(default=1.0, gt=0)
    """The temperature, which divides the logits of both models."""
    top_k: int = Field(default=0, ge=0, le=4096)
    """The number of the teacher's likeliest tokens that are compared one by one; all other tokens are compared as one.
    0 compares the whole vocabulary.
    """
    cache: str = ""
    """A directory that stores the teacher's likeliest tokens of every sequence, 6 bytes each, for later epochs and
    runs; none if empty.
    """

    @model_validator(mode="after")
    def _caches_the_top(self) -> DistillSpec:
        if self.cache and not self.top_k:
            raise ValueError("cache keeps the most likely tokens: give top_k, such as 64")
        return self
