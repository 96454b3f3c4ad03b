"""The supported model families: how each family's `config.json` becomes an `Architecture`.

Reads configs of transformers 5 (`rope_parameters`, `layer_types`) and transformers 4 (`rope_scaling`, `rope_theta` and
flags). Missing fields get the defaults of the family's transformers class, since older directories leave fields out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from raytide.actors.models.architecture import Architecture, LayerSpec
from raytide.actors.models.components.experts import MOST_EXPERTS, Experts, balance_weight, checked
from raytide.actors.models.components.llava import LLAVA, decoder_config, vision_spec
from raytide.actors.models.components.rope import RopeSpec, read_rope
from raytide.actors.models.model_config import Fields, read_json
from raytide.actors.models.quantized.gguf.gguf_config import gguf_config
from raytide.actors.models.quantized.gguf.gguf_file import GgufFile, is_gguf
from raytide.actors.models.quantized.quantization_config import read_quantization
from raytide.core.bounds import shortened
from raytide.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from raytide.kernels.core import Activation

_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_MOST_LAYERS, _MOST_HEAD_DIM = 1024, 4096


def read_architecture(model_dir: Path, *, serves: bool = False) -> Architecture:
    """Reads the architecture of a model directory or GGUF file. Raises DataError if the files cannot be read. Raises
    ConfigError if the architecture is not supported.

    Models with a classification head and models that read images are supported only if `serves` is true.
    """
    if is_gguf(model_dir):
        return architecture_of(gguf_config(GgufFile(model_dir)), str(model_dir))
    path = model_dir / "config.json"
    return architecture_of(read_json(path), str(path), serves=serves)


def is_same_architecture(theirs: Architecture, ours: Architecture) -> bool:
    """Returns whether an engine of the architecture `ours` can serve weights of the architecture `theirs`."""
    return replace(theirs, dtype=ours.dtype, eos_token_ids=ours.eos_token_ids) == ours


def architecture_of(config: Mapping[str, object], where: str, *, serves: bool = False) -> Architecture:
    """Returns the architecture that a `config.json` describes. `where` names the file in errors."""
    fields = Fields(config, where)
    name = shortened(str((fields.items("architectures") or ["(none)"])[0]), 100)
    if name == LLAVA and serves:
        return _llava(fields)
    family = _CLASSIFIERS.get(name)
    if family is not None and not serves:
        raise ConfigError(
            f"{where}: {name} has a classification head, which only the native engine computes.",
            hint=f"Use a model of the architecture {family}.",
        )
    if name == LLAVA:
        raise ConfigError(f"{where}: {name} reads images, which only the native engine does.", hint="Use a text model.")
    if (family or name) not in _FAMILIES:
        raise ConfigError(f"{where}: architecture {name} is not supported.", hint=f"Supported: {', '.join(SUPPORTED)}.")
    read_quantization(fields.body, where)  # refuses here, before anything is planned or started
    is_causal = fields.flag("is_causal", True)
    if not is_causal or fields.body.get("use_bidirectional_attention") or fields.body.get("add_cross_attention"):
        raise ConfigError(f"{where}: the model is not a causal decoder.", hint="Use its decoder-only variant.")
    arch = _FAMILIES[family or name](fields)
    if family is not None:
        arch = replace(arch, num_labels=_num_labels(fields), tied_embeddings=False, logit_softcap=None)
    if arch.head_dim > _MOST_HEAD_DIM:
        raise DataError(
            f"{where}: heads of {arch.head_dim} elements are not supported.", hint=f"At most {_MOST_HEAD_DIM}."
        )
    if arch.num_heads % arch.num_kv_heads:
        raise DataError(
            f"{where}: {arch.num_heads} attention heads cannot share {arch.num_kv_heads} KV heads.",
            hint="The first must be a multiple of the second.",
        )
    return arch


def _llama(fields: Fields) -> Architecture:
    bias = fields.flag("attention_bias", False)
    base = _base(fields)
    return replace(base, qkv_bias=bias, attention_out_bias=bias, ffn_bias=fields.flag("mlp_bias", False))


def _mistral(fields: Fields) -> Architecture:
    window = fields.optional_whole("sliding_window", 4096)
    return _base(fields, windows=[window] * _depth(fields))


def _phi3(fields: Fields) -> Architecture:
    window = fields.optional_whole("sliding_window")
    return replace(_base(fields, eps=1e-5, windows=[window] * _depth(fields)), names="phi3")


def _qwen2(fields: Fields) -> Architecture:
    return replace(_base(fields, windows=_qwen_windows(fields)), qkv_bias=True)


def _qwen3(fields: Fields) -> Architecture:
    bias = fields.flag("attention_bias", False)
    base = _base(fields, head_dim=fields.whole("head_dim", 128), windows=_qwen_windows(fields))
    return replace(base, head_norms=True, qkv_bias=bias, attention_out_bias=bias)


def _qwen3_moe(fields: Fields) -> Architecture:
    bias, count = fields.flag("attention_bias", False), _depth(fields)
    window = fields.optional_whole("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None
    dense, every = fields.items("mlp_only_layers"), fields.whole("decoder_sparse_step", 1)
    sparse = [i not in dense and (i + 1) % every == 0 for i in range(count)]
    experts = Experts(
        fields.whole("num_experts", fields.whole("num_local_experts", 128), most=MOST_EXPERTS),
        fields.whole("num_experts_per_tok", 8),
        fields.whole("moe_intermediate_size", 768),
        fields.flag("norm_topk_prob", False),
        balance_weight(fields),
    )
    base = _base(fields, windows=[window] * count, sparse=sparse)
    return replace(
        base, head_norms=True, qkv_bias=bias, attention_out_bias=bias, experts=checked(experts, fields, count)
    )


def _mixtral(fields: Fields) -> Architecture:
    window, count = fields.optional_whole("sliding_window"), _depth(fields)
    experts = Experts(
        fields.whole("num_local_experts", 8, most=MOST_EXPERTS),
        fields.whole("num_experts_per_tok", 2),
        fields.whole("intermediate_size"),
        renormalize=True,
        balance=balance_weight(fields),
    )
    base = _base(fields, theta=1e6, eps=1e-5, windows=[window] * count, sparse=[True] * count)
    return replace(base, names="mixtral", experts=checked(experts, fields, count))


def _smollm3(fields: Fields) -> Architecture:
    """Returns a SmolLM3, a Llama. Some layers, by default every fourth, have no rotation and may have a window."""
    bias, every, count = fields.flag("attention_bias", False), fields.whole("no_rope_layer_interval", 4), _depth(fields)
    turns = fields.items("no_rope_layers") or [(i + 1) % every != 0 for i in range(count)]
    if len(turns) < count:
        raise DataError(f"{fields.where}: no_rope_layers does not name {count} layers.", hint="Export the model again.")
    window = fields.optional_whole("sliding_window") if fields.flag("use_sliding_window", False) else None
    types = fields.items("layer_types") or [_FULL if turn else _SLIDING for turn in turns[:count]]
    base = _base(fields, theta=2e6, windows=_windows(fields, types, window))
    return replace(
        base,
        layers=tuple(replace(each, rope=0 if turn else None) for each, turn in zip(base.layers, turns, strict=False)),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        attention_out_bias=bias,
        ffn_bias=fields.flag("mlp_bias", False),
    )


def _gemma1(fields: Fields) -> Architecture:
    """Returns a Gemma of the first generation. As in transformers, its "gelu" means the approximation by tanh."""
    bias, activation = fields.flag("attention_bias", False), fields.text("hidden_act", "gelu")
    activation = "gelu_pytorch_tanh" if activation == "gelu" else activation
    base = _base(fields, head_dim=fields.whole("head_dim", 256), activation=activation)
    return replace(
        base,
        norm_offset=1.0,
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        embedding_scale=base.hidden_size**0.5,
        qkv_bias=bias,
        attention_out_bias=bias,
    )


def _gemma2(fields: Fields) -> Architecture:
    return replace(
        _gemma(fields, every=2),
        attention_softcap=fields.optional_number("attn_logit_softcapping", 50.0),
        logit_softcap=fields.optional_number("final_logit_softcapping", 30.0),
    )


def _gemma3(fields: Fields) -> Architecture:
    """Returns a Gemma 3. Its layers with a window have their own rotation. As in transformers, an attention soft-cap in
    the config is ignored.
    """
    ropes, scaled = fields.section("rope_parameters"), fields.section("rope_scaling")
    theta, local_theta = fields.number("rope_theta", 1e6, above=1), fields.number("rope_local_base_freq", 1e4, above=1)
    base = _gemma(fields, every=fields.whole("sliding_window_pattern", 6))
    return replace(
        base,
        head_norms=True,
        layers=tuple(replace(layer, rope=1 if layer.window else 0) for layer in base.layers),
        ropes=(
            _rope(fields, ropes.section(_FULL) if _FULL in ropes.body else scaled, base.head_dim, theta),
            _rope(fields, ropes.section(_SLIDING), base.head_dim, local_theta),
        ),
        logit_softcap=fields.optional_number("final_logit_softcapping"),
    )


def _gemma(fields: Fields, *, every: int) -> Architecture:
    """Returns a Gemma: layers with a sliding window, and full attention in every `every`-th layer."""
    bias = fields.flag("attention_bias", False)
    types = fields.items("layer_types") or [_SLIDING if (i + 1) % every else _FULL for i in range(_depth(fields))]
    base = _base(
        fields,
        head_dim=fields.whole("head_dim", 256),
        activation=fields.text("hidden_activation", "gelu_pytorch_tanh"),
        scale=fields.number("query_pre_attn_scalar", 256.0, above=0) ** -0.5,
        windows=_windows(fields, types, fields.optional_whole("sliding_window", 4096)),
    )
    return replace(
        base,
        names="gemma",
        norm_offset=1.0,
        post_norms=True,
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        embedding_scale=base.hidden_size**0.5,
        qkv_bias=bias,
        attention_out_bias=bias,
    )


def _gpt2(fields: Fields) -> Architecture:
    heads, hidden = fields.whole("n_head"), fields.whole("n_embd")
    scale = max(1, hidden // heads) ** -0.5 if fields.flag("scale_attn_weights", True) else 1.0
    deeper = fields.flag("scale_attn_by_inverse_layer_idx", False)
    scales = [scale / (i + 1) if deeper else scale for i in range(_depth(fields, "n_layer"))]
    return Architecture(
        names="gpt2",
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden,
        ffn_size=fields.whole("n_inner", 4 * hidden),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        layers=tuple(LayerSpec(each, rope=None) for each in scales),
        max_model_len=fields.whole("n_positions"),
        dtype=_dtype(fields),
        eos_token_ids=fields.ids("eos_token_id"),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        activation=_activation(fields, fields.text("activation_function", "gelu_new")),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        norm_kind="layer",
        gated_ffn=False,
        learned_positions=True,
        qkv_bias=True,
        attention_out_bias=True,
        ffn_bias=True,
    )


def _base(
    fields: Fields,
    *,
    head_dim: int | None = None,
    theta: float = 1e4,
    eps: float = 1e-6,
    scale: float | None = None,
    activation: str | None = None,
    windows: list[int | None] | None = None,
    sparse: list[bool] | None = None,
) -> Architecture:
    """Returns an architecture like Llama's; the arguments are the family's defaults, and each layer's window and
    sparsity.
    """
    count, heads, hidden = _depth(fields), fields.whole("num_attention_heads"), fields.whole("hidden_size")
    size = head_dim or fields.whole("head_dim", max(1, hidden // heads))
    parameters = fields.section("rope_parameters" if fields.body.get("rope_parameters") else "rope_scaling")
    per_type = {_FULL, _SLIDING} & parameters.body.keys()  # Gemma 3 reads these itself
    rope = _rope(
        fields, Fields({}, fields.where) if per_type else parameters, size, fields.number("rope_theta", theta, above=1)
    )
    windows, sparse = windows or [None] * count, sparse or [False] * count
    if not len(windows) == len(sparse) == count:
        raise DataError(f"{fields.where}: layer_types does not name {count} layers.", hint="Export the model again.")
    return Architecture(
        names="llama",
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden,
        ffn_size=fields.whole("intermediate_size"),
        num_heads=heads,
        num_kv_heads=fields.whole("num_key_value_heads", heads),
        head_dim=size,
        layers=tuple(
            LayerSpec(size**-0.5 if scale is None else scale, window, sparse=is_sparse)
            for window, is_sparse in zip(windows, sparse, strict=True)
        ),
        max_model_len=_max_len(fields, rope),
        dtype=_dtype(fields),
        eos_token_ids=fields.ids("eos_token_id"),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        activation=_activation(fields, activation or fields.text("hidden_act", "silu")),
        norm_eps=fields.number("rms_norm_eps", eps),
        ropes=(rope,),
    )


def _depth(fields: Fields, name: str = "num_hidden_layers") -> int:
    return fields.whole(name, most=_MOST_LAYERS)


def _rope(fields: Fields, parameters: Fields, head_dim: int, theta: float) -> RopeSpec:
    partial = fields.number("partial_rotary_factor", 1.0)
    return read_rope(parameters, head_dim=head_dim, theta=theta, partial=partial, config=fields)


def _max_len(fields: Fields, rope: RopeSpec) -> int:
    """Returns the context length in tokens. For yarn it is the original length times the factor, because Qwen's configs
    give the original length as their positions.
    """
    positions = fields.whole("max_position_embeddings")
    return max(positions, int(rope.original_max_len * rope.factor)) if rope.kind == "yarn" else positions


def _qwen_windows(fields: Fields) -> list[int | None]:
    window = fields.optional_whole("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None
    first = fields.number("max_window_layers", 28)
    old = [_SLIDING if i >= first else _FULL for i in range(_depth(fields))]
    return _windows(fields, fields.items("layer_types") or old, window)


def _windows(fields: Fields, layer_types: Items[object], window: int | None) -> list[int | None]:
    unknown = [each for each in layer_types if each not in (_FULL, _SLIDING)]
    if unknown:
        raise ConfigError(
            f"{fields.where}: layer type {shortened(str(unknown[0]), 100)} is not supported.",
            hint=f"Supported: {_FULL}, {_SLIDING}.",
        )
    return [window if each == _SLIDING else None for each in layer_types]


def _llava(fields: Fields) -> Architecture:
    text = decoder_config(fields)
    return replace(architecture_of(text.body, text.where), vision=vision_spec(fields))


def _num_labels(fields: Fields) -> int:
    """Returns the number of labels. transformers writes it as a map of the labels' names, or not at all if there are
    two.
    """
    names = fields.section("id2label").body
    return len(names) if 0 < len(names) <= _MOST_LABELS else fields.whole("num_labels", 2, most=_MOST_LABELS)


def _activation(fields: Fields, name: str) -> Activation:
    if name not in _ACTIVATIONS:
        raise ConfigError(
            f"{fields.where}: activation {shortened(name, 100)} is not supported.",
            hint=f"Supported: {', '.join(_ACTIVATIONS)}.",
        )
    return _ACTIVATIONS[name]


def _dtype(fields: Fields) -> str:
    return fields.text("dtype", fields.text("torch_dtype", "float32"))


_FAMILIES: Mapping[str, Callable[[Fields], Architecture]] = {
    "GPT2LMHeadModel": _gpt2,
    "GemmaForCausalLM": _gemma1,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "SmolLM3ForCausalLM": _smollm3,
}

_CLASSIFIERS: Mapping[str, str] = {
    f"{name.removesuffix('LMHeadModel').removesuffix('ForCausalLM')}ForSequenceClassification": name
    for name in _FAMILIES
    if name != "Gemma3ForCausalLM"  # its classifier reads images too
}
"""The family of each architecture with a classification head on the last token's state."""
_MOST_LABELS = 1024

SUPPORTED = tuple(_FAMILIES)
