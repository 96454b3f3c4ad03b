"""A model directory of a stranger: whatever it holds, reading it ends soon, in little memory, with a clear error."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.actors.engine.families import FAMILIES
from tests.actors.engine.tiny import save_llama, save_tokenizer

from raytide.actors.engine.text.tokenizer import Tokenizer
from raytide.actors.models.components.rope import cos_sin
from raytide.actors.models.content import MOST_HEADER_BYTES, content_digest
from raytide.actors.models.families import architecture_of, read_architecture
from raytide.actors.models.loader import Weights
from raytide.actors.models.model_config import MOST_FILE_BYTES, read_json
from raytide.actors.trainer.hf.weight_mapping import HfWeights
from raytide.core.errors import DataError, RaytideError

MOST_MEMORY = 200 << 20
WEIGHTS, NORM = "model.safetensors", "model.norm.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_llama(tmp_path)
    return tmp_path


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


def safetensors(path: Path, header: bytes, length: int | None = None, size: int = 0) -> None:
    """Writes a file with this header, that claims a header of `length` bytes, and is `size` bytes long (sparse)."""
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header)
    if size:
        os.truncate(path, size)


def tensor(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def huge_header(path: Path) -> None:
    safetensors(path, b"{", length=40 << 30, size=41 << 30)


def header_beyond_the_file(path: Path) -> None:
    safetensors(path, b"{}", length=2**63)


def header_that_is_just_too_large(path: Path) -> None:
    safetensors(path, b" " * (MOST_HEADER_BYTES + 1), size=40 << 20)


def deep_header(path: Path) -> None:
    safetensors(path, b'{"a":' + b"[" * 100_000)


def offsets_beyond_the_file(path: Path) -> None:
    safetensors(path, json.dumps({NORM: tensor([1 << 40], 0, 1 << 42)}).encode())


def offsets_before_the_file(path: Path) -> None:
    safetensors(path, json.dumps({NORM: tensor([64], -300, -44)}).encode())


def offsets_that_are_no_numbers(path: Path) -> None:
    safetensors(path, json.dumps({NORM: tensor([64], 0, 256) | {"data_offsets": ["a", None]}}).encode())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


BROKEN: list[Callable[[Path], None]] = [
    huge_header,
    header_beyond_the_file,
    header_that_is_just_too_large,
    deep_header,
    offsets_beyond_the_file,
    offsets_before_the_file,
    offsets_that_are_no_numbers,
    cut,
    empty,
    pipe,
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_weights_file_is_named_by_engine_trainer_and_digest(model: Path, how: Callable[[Path], None]) -> None:
    arch = read_architecture(model)
    how(model / WEIGHTS)
    with little_memory():
        for read in (
            lambda: Weights(model, torch.float32, torch.device("cpu")),
            lambda: HfWeights(model, arch),
            lambda: content_digest(model),
        ):
            with pytest.raises(DataError, match=r"model\.safetensors"):
                read()


@pytest.mark.timeout(300)
def test_headers_of_many_files_are_bounded_together(model: Path) -> None:
    for number in range(40):
        safetensors(model / f"more{number}.safetensors", b'{"__metadata__":{"a":"' + b" " * (1 << 20) + b'"}}')
    for read in (lambda: Weights(model, torch.float32, torch.device("cpu")), lambda: content_digest(model)):
        with pytest.raises(DataError, match=r"headers of this directory exceed 32 MiB"):
            read()


def test_a_tensor_far_larger_than_the_config_says_is_never_allocated(model: Path) -> None:
    elements = 1 << 31
    header = json.dumps({NORM: tensor([elements], 0, 4 * elements)}).encode()
    safetensors(model / WEIGHTS, header, size=8 + len(header) + 4 * elements)
    weights = Weights(model, torch.float32, torch.device("cpu"))
    with pytest.raises(DataError, match=r"model\.norm\.weight has shape \(2147483648,\), config\.json implies \(64,\)"):
        weights.get(NORM, 64)
    content_digest(model)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn])
def test_weights_of_another_kind_of_number_are_refused(model: Path, dtype: torch.dtype) -> None:
    tensors = load_file(model / WEIGHTS)
    save_file(tensors | {NORM: tensors[NORM].to(dtype)}, model / WEIGHTS)
    weights = Weights(model, torch.float32, torch.device("cpu"))
    for read in (lambda: weights.get(NORM, 64), lambda: weights.part(NORM, (slice(0, 4),))):
        with pytest.raises(DataError, match=r"model\.norm\.weight is stored as (I64|BOOL|F8_E4M3)"):
            read()


@pytest.mark.parametrize(
    "index",
    [
        {NORM: "model.safetensors", "another": "model.safetensors"},
        {NORM: "gone.safetensors"},
        {NORM: 5},
        {NORM: ["model.safetensors"]},
        {NORM: "../../../../../../etc/passwd"},
        {NORM: "\0"},
    ],
)
def test_an_index_that_lies_is_a_clear_error(model: Path, index: dict[str, object]) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    weights = Weights(model, torch.float32, torch.device("cpu"))
    for name in index:
        if index[name] == WEIGHTS and name == NORM:
            continue
        with pytest.raises(RaytideError):
            weights.shape(name)
        with pytest.raises(RaytideError):
            weights.get(name, 64)
    with pytest.raises(RaytideError):
        HfWeights(model, read_architecture(model))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "content",
    [b"[" * 200_000, b'{"a":' * 200_000, b"\xff\xfe", b"[]", b"", b"1" * 10_000, None, "sparse"],
    ids=["lists", "objects", "bytes", "list", "empty", "digits", "pipe", "sparse"],
)
def test_a_json_file_of_a_stranger_is_a_clear_error(model: Path, name: str, content: bytes | str | None) -> None:
    path = model / name
    path.unlink(missing_ok=True)
    if content is None:
        os.mkfifo(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.touch()
        os.truncate(path, 4 << 30)
    with little_memory():
        with pytest.raises(DataError, match=name):
            read_json(path)
        if name != "config.json":
            with pytest.raises(DataError, match=name):
                Tokenizer(model)
        else:
            with pytest.raises(DataError, match=name):
                read_architecture(model)


def test_a_template_that_is_no_text_or_far_too_long_is_a_clear_error(model: Path) -> None:
    template = model / "chat_template.jinja"
    template.write_bytes(b"\xff")
    with pytest.raises(DataError, match="not UTF-8"):
        Tokenizer(model)
    template.unlink()
    template.touch()
    os.truncate(template, MOST_FILE_BYTES + 1)
    with pytest.raises(DataError, match="more than 64 MiB"):
        Tokenizer(model)
    for source in ("{{ a }}" * 100_000, "{% if a %}" * 2000 + "{% endif %}" * 2000, "{{ " + "(" * 5000):
        template.write_text(source)
        with pytest.raises(RaytideError, match="chat template"):
            Tokenizer(model).chat_format  # noqa: B018


def test_special_tokens_that_are_no_text_are_ignored(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": [1]}, "bos_token": 7}')
    assert Tokenizer(tmp_path).eos_token_ids == frozenset()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": {"a": 1}}')
    with pytest.raises(DataError, match="eos_token_id"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": 1e9}, "num_hidden_layers"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"vocab_size": 10**30}, "vocab_size"),
        ({"num_attention_heads": 10**400}, "num_attention_heads"),
        ({"head_dim": 1 << 20}, "heads of 1048576"),
        ({"rope_parameters": {"rope_type": "linear", "factor": float("nan")}}, "factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 1e308}}, "factor"),
        ({"partial_rotary_factor": 1e9}, "rotated"),
        ({"architectures": [["x"] * 10_000]}, "not supported"),
    ],
)
def test_absurd_numbers_are_named(model: Path, changes: dict[str, object], name: str) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_parameters": None} | changes))
    with little_memory(), pytest.raises(RaytideError, match=name) as refused:
        read_architecture(model)
    assert len(str(refused.value)) < 1000


def test_absurd_numbers_of_experts_are_refused_before_their_weights_are_listed() -> None:
    config = {"architectures": ["MixtralForCausalLM"], **_PLAIN, "num_hidden_layers": 1024, "num_local_experts": 1024}
    with little_memory(), pytest.raises(DataError, match="1024 experts in 1024 layers"):
        architecture_of(config, "config.json")


_PLAIN: dict[str, object] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "n_head": 4,
    "n_embd": 64,
    "n_layer": 3,
    "n_positions": 256,
}
_MORE = (
    *("num_key_value_heads", "head_dim", "sliding_window", "layer_types", "rope_parameters", "rope_scaling"),
    *("rope_theta", "max_window_layers", "use_sliding_window", "num_experts", "num_local_experts", "mlp_only_layers"),
    *("num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step", "query_pre_attn_scalar", "hidden_act"),
    *("partial_rotary_factor", "original_max_position_embeddings", "eos_token_id", "dtype", "n_inner"),
    *("rope_local_base_freq", "sliding_window_pattern", "attention_bias", "tie_word_embeddings", "architectures"),
)
_ODD = st.one_of(
    st.sampled_from([0, 1, -1, 2, 10**9, 10**30, 10**400, 1e308, -1e308, 1e-300, 0.5, float("nan"), float("inf")]),
    st.none(),
    st.booleans(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=2)), max_size=4),
    st.fixed_dictionaries(
        {"rope_type": st.sampled_from(["default", "linear", "llama3", "longrope", "yarn", 5])},
        optional={
            name: st.one_of(st.integers(-2, 10**12), st.floats(), st.lists(st.floats(), max_size=8))
            for name in (
                *("factor", "rope_theta", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
                *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "short_factor"),
                *("long_factor", "partial_rotary_factor"),
            )
        },
    ),
)


@settings(max_examples=400, deadline=None)
@given(
    kind=st.sampled_from(sorted({kind for kind, _ in FAMILIES.values()})),
    changes=st.dictionaries(st.sampled_from([*_PLAIN, *_MORE]), _ODD, max_size=4),
)
def test_any_config_gives_an_architecture_or_a_clear_error(kind: str, changes: dict[str, object]) -> None:
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    try:
        arch = architecture_of({"architectures": [name], **_PLAIN, **changes}, "config.json")
        assert arch.num_layers <= 1024
        for rope in arch.ropes:
            cos_sin(rope, 16)
    except RaytideError:
        pass
