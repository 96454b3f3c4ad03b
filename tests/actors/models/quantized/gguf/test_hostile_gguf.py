"""GGUF files from strangers: damaged ones give an error that names the file, and cost no memory beyond their size."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from tests.actors.models.quantized.gguf.gguf_files import field, header, tensor, text

from raytide.actors.models.content import content_digest
from raytide.actors.models.families import read_architecture
from raytide.actors.models.quantized.gguf.gguf_file import GgufFile
from raytide.actors.models.quantized.model_weights import open_weights
from raytide.core.errors import ConfigError, DataError, RaytideError

HUGE = 2**62
LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 2,
}
EPS = text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5)
Q8_0, Q5_K = 8, 13


def fields(**changes: object) -> list[bytes]:
    named = {**LLAMA, **{name.replace("__", "."): value for name, value in changes.items()}}
    return [field(name, value) for name, value in named.items() if value is not None] + [EPS]  # type: ignore[arg-type]


def written(folder: Path, content: bytes) -> Path:
    path = folder / "m.gguf"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot read"),
        (b"GGML" + bytes(60), "is no GGUF file"),
        (header(version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF\3\0\0\0", "middle of its header"),
        (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), f"announces {HUGE} tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), f"tensors and {HUGE} fields|and {HUGE} fields"),
        (header([struct.pack("<Q", HUGE)]), "name has"),
        (header([text("a") + struct.pack("<IQ", 8, HUGE)]), "middle of its header"),
        (header([text("a") + struct.pack("<IIQ", 9, 4, HUGE)]), "middle of its header"),
        (header([text("a") + struct.pack("<IIQ", 9, 8, HUGE)]), "more than .* texts"),
        (header([text("a") + struct.pack("<IIQ", 9, 8, 1000)]), "middle of its header"),
        (header([text("a") + struct.pack("<IIQ", 9, 9, 1)]), "unknown type 9"),
        (header([text("a") + struct.pack("<I", 77)]), "unknown type 77"),
        (header([field("a", 1), field("a", 1)]), "field a stands twice"),
        (header([field("a", 1)], [tensor("t", [2]), tensor("t", [2])]) + bytes(64), "tensor t stands twice"),
        (header(tensors=[tensor("t", [HUGE, HUGE])]), "outside of the file"),
        (header(tensors=[tensor("t", [8], offset=HUGE)]) + bytes(64), "outside of the file"),
        (header(tensors=[tensor("t", [0])]) + bytes(64), "outside of the file"),
        (header(tensors=[tensor("t", [1] * 9)]), "9 dimensions"),
        (header(tensors=[tensor("t", [48], Q8_0)]) + bytes(64), "no multiple of 32"),
        (header(tensors=[tensor("t", [256], Q5_K)]) + bytes(640), "has the format Q5_K, which is not read"),
        (header(tensors=[tensor("t", [256], 99)]) + bytes(640), "the format number 99"),
        (header([field("general.alignment", 0)], [tensor("t", [2])]) + bytes(64), "alignment"),
        (header([text("a") + struct.pack("<IQ", 8, 2) + b"\xff\xfe"]), "not UTF-8"),
    ],
)
def test_a_damaged_header_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    tracemalloc.start()
    with pytest.raises(RaytideError, match=message) as caught:
        GgufFile(path)
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most_bytes < 4 << 20
    assert caught.value.hint


def test_random_damage_gives_an_error_or_a_file_but_nothing_else(tmp_path: Path) -> None:
    whole = header([*fields(), field("x", ["a", "bc"])], [tensor("token_embd.weight", [32, 8], Q8_0)]) + bytes(8 * 34)
    path, random_numbers = tmp_path / "m.gguf", random.Random(5)
    outcomes = set()
    for _ in range(400):
        content = bytearray(whole[: random_numbers.choice([len(whole), random_numbers.randrange(len(whole))])])
        for _ in range(random_numbers.randrange(4)):
            if content:
                content[random_numbers.randrange(len(content))] = random_numbers.choice([0, 1, 0x7F, 0x80, 0xFF])
        path.write_bytes(content)
        try:
            read_architecture(path)
            content_digest(path)
            open_weights(path, torch.float32, torch.device("cpu")).get("model.embed_tokens.weight", 8, 32)
            outcomes.add("read")
        except RaytideError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "mamba"}, "architecture mamba is not supported"),
        ({"general__architecture": None}, "general.architecture is missing"),
        ({"llama__block_count": None}, "llama.block_count is missing"),
        ({"llama__block_count": 2**31}, "num_hidden_layers"),
        ({"llama__context_length": "long"}, "llama.context_length is not a number"),
        ({"llama__expert_count": 8}, "llama.expert_count 8 is not supported"),
        ({"split__count": 3}, "split.count 3 is not supported"),
        ({"llama__rope__dimension_count": 8}, "a rotation of 8 of 16 elements"),
        ({"llama__rope__scaling__type": "ntk", "llama__rope__scaling__factor": 2}, "rope scaling ntk"),
    ],
)
def test_an_architecture_that_is_not_computed_is_refused(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        read_architecture(written(tmp_path, header([*fields(**changes), field("llama.vocab_size", 8)])))


def test_tensors_are_checked_when_they_are_read(tmp_path: Path) -> None:
    nan = struct.pack("<e", float("nan")) + bytes(32)
    listed = [tensor("token_embd.weight", [32, 1], Q8_0), tensor("blk.0.attn_sinks.weight", [1], offset=64)]
    path = written(tmp_path, header(fields(), listed) + nan + bytes(64))
    weights = open_weights(path, torch.float32, torch.device("cpu"))
    with pytest.raises(DataError, match=r"token_embd.weight has scales that are not finite"):
        weights.quantized("model.embed_tokens", 1, 32)
    with pytest.raises(DataError, match=r"has shape \(1, 32\), its fields imply \(2, 32\)"):
        weights.quantized("model.embed_tokens", 2, 32)
    with pytest.raises(DataError, match=r"no tensor output_norm.weight \(model.norm.weight\)"):
        weights.get("model.norm.weight", 32)
    with pytest.raises(DataError, match=r"tensors that its architecture does not: blk.0.attn_sinks"):
        weights.check_all_read()


def test_the_version_changes_with_fields_and_with_content(tmp_path: Path) -> None:
    listed = [tensor("token_embd.weight", [32, 1])]
    versions = {
        content_digest(written(tmp_path, header(fields(llama__context_length=length), listed) + bytes([fill]) * 128))
        for length in (64, 65)
        for fill in (0, 1)
    }
    assert len(versions) == 4
