"""The token dataset's format, without a pipeline: a hand-made dataset, read and damaged."""

import json
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from raytide.core.errors import ConfigError, DataError
from raytide.core.io.storage import sha256
from raytide.core.io.token_dataset import (
    DocumentIndex,
    Shard,
    Source,
    TokenManifest,
    document_ends,
    dtype_for,
    load_manifest,
    verify,
)
from raytide.core.specs.data import DataSpec


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    shards = []
    (tmp_path / "shards").mkdir()
    for i, ids in enumerate(([5, 6, 0], [7, 0])):
        data = array("H", ids).tobytes()
        (tmp_path / "shards" / f"{i:05d}.bin").write_bytes(data)
        shards.append(Shard(file=f"shards/{i:05d}.bin", tokens=len(ids), sha256=sha256(data)))
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    manifest = TokenManifest(
        tokenizer_sha256=sha256(b"{}"),
        vocab_size=300,
        eos_id=0,
        dtype="uint16",
        documents=2,
        tokens=5,
        shards=tuple(shards),
        source=Source(digest="d", read=3, kept=2, dropped={"too_short": 1}),
    )
    (tmp_path / "manifest.json").write_bytes(manifest.to_bytes())
    return tmp_path


def edit(dataset: Path, **changes: object) -> None:
    path = dataset / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_whole_dataset_is_verified_and_its_manifest_survives_the_round_trip(dataset: Path) -> None:
    manifest = verify(str(dataset))
    assert manifest.to_bytes() == (dataset / "manifest.json").read_bytes()
    assert (manifest.documents, manifest.tokens, manifest.source.dropped) == (2, 5, {"too_short": 1})


def test_a_dataset_is_read_by_url(dataset: Path) -> None:
    assert load_manifest(f"file://{dataset}") == load_manifest(str(dataset))


@pytest.mark.parametrize("byte", range(4))
def test_a_flipped_byte_in_a_shard_is_found_and_the_shard_named(dataset: Path, byte: int) -> None:
    shard = dataset / "shards" / "00001.bin"
    data = bytearray(shard.read_bytes())
    data[byte] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match=r"00001\.bin was changed"):
        verify(str(dataset))


def test_a_shard_that_was_cut_off_is_found_with_both_sizes(dataset: Path) -> None:
    shard = dataset / "shards" / "00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DataError, match="has 5 bytes; its manifest has 6"):
        verify(str(dataset))


@pytest.mark.parametrize("file", ["shards/00000.bin", "tokenizer.json"])
def test_a_file_that_is_gone_is_named(dataset: Path, file: str) -> None:
    (dataset / file).unlink()
    with pytest.raises(DataError, match=f"{file} is missing"):
        verify(str(dataset))


def test_an_altered_tokenizer_is_found(dataset: Path) -> None:
    (dataset / "tokenizer.json").write_bytes(b"[]")
    with pytest.raises(DataError, match=r"tokenizer\.json was changed"):
        verify(str(dataset))


def index(dataset: Path, *ends: list[int]) -> TokenManifest:
    """The dataset with an index of these ends beside each shard."""
    manifest = load_manifest(str(dataset))
    shards = []
    for shard, of_shard in zip(manifest.shards, ends, strict=True):
        body = array("Q", of_shard).tobytes()
        file = shard.file.replace(".bin", ".idx")
        (dataset / file).write_bytes(body)
        found = DocumentIndex(file=file, documents=len(of_shard), sha256=sha256(body))
        shards.append(shard.model_copy(update={"index": found}))
    indexed = manifest.model_copy(update={"shards": tuple(shards)})
    (dataset / "manifest.json").write_bytes(indexed.to_bytes())
    return load_manifest(str(dataset))


def test_document_ends_come_from_the_index(dataset: Path) -> None:
    """The index decides: an `eos_id` inside a document ends none."""
    manifest = index(dataset, [], [4, 5])
    assert verify(str(dataset)) == manifest
    assert document_ends(str(dataset), manifest).tolist() == [4, 5]


def test_a_dataset_of_version_1_has_its_ends_where_its_eos_ids_are(dataset: Path) -> None:
    edit(dataset, version=1)
    manifest = load_manifest(str(dataset))
    assert document_ends(str(dataset), manifest).tolist() == [3, 5]
    path = dataset / "manifest.json"
    path.write_text(json.dumps(without_index(json.loads(path.read_text()))))  # as version 1 was written
    assert load_manifest(str(dataset)) == manifest


def without_index(manifest: dict[str, object]) -> dict[str, object]:
    shards = manifest["shards"]
    assert isinstance(shards, list)
    return manifest | {"shards": [{key: shard[key] for key in ("file", "tokens", "sha256")} for shard in shards]}


def test_an_altered_index_is_found(dataset: Path) -> None:
    manifest = index(dataset, [3], [5])
    (dataset / "shards" / "00001.idx").write_bytes(array("Q", [4]).tobytes())
    for read in (verify, lambda url: document_ends(url, manifest)):
        with pytest.raises(DataError, match=r"00001\.idx was changed"):
            read(str(dataset))


@pytest.mark.parametrize("ends", [([3], [3]), ([0], [5]), ([3], [6]), ([4], [2])])
def test_an_index_that_does_not_increase_inside_the_dataset_is_refused(
    dataset: Path, ends: tuple[list[int], ...]
) -> None:
    manifest = index(dataset, *ends)
    with pytest.raises(DataError, match="not an increasing list of token positions"):
        document_ends(str(dataset), manifest)


def test_an_index_holds_every_document_or_the_manifest_is_refused(dataset: Path) -> None:
    with pytest.raises(DataError, match="do not hold the ends of 2 documents"):
        index(dataset, [3], [])


def test_a_directory_without_a_manifest_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not a token dataset: it has no manifest\.json") as caught:
        load_manifest(str(tmp_path))
    assert "raytide data build" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 3}, "has version 3; this raytide reads 1 and 2"),
        ({"tokens": 6}, "the shards hold 5 tokens, not 6"),
        ({"eos_id": 300}, "eos_id 300 is outside the vocabulary of 300"),
        ({"vocab_size": 70_000}, "uint16 cannot hold a vocabulary of 70000"),
        ({"dtype": "float32"}, "dtype"),
        ({"shards": [{"file": "../x", "tokens": 5, "sha256": "0" * 64}]}, "a shard lies inside its dataset"),
        ({"surprise": 1}, "surprise"),
        ({"tokenizer": "../../secret"}, "the tokenizer lies inside its dataset"),
        ({"tokenizer": "/etc/hostname"}, "the tokenizer lies inside its dataset"),
        ({"tokenizer": "manifest.json"}, "two files have the same name"),
        ({"tokens": -5}, "tokens"),
        ({"tokens": 1e400}, "tokens"),
        ({"documents": -1}, "documents"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"version": {"a": "b" * 1000}}, "has version"),
    ],
)
def test_a_manifest_that_cannot_be_true_is_refused(dataset: Path, changes: dict[str, object], said: str) -> None:
    edit(dataset, **changes)
    with pytest.raises(DataError, match=said):
        load_manifest(str(dataset))


@pytest.mark.parametrize(
    "file", ["", ".", "a/../b", "a//b", "a\\b", "a\x00b", "a\nb", "s3://x/y", "/x", "a/", "x" * 2000]
)
def test_a_shard_s_name_stays_inside_its_dataset(dataset: Path, file: str) -> None:
    edit(dataset, shards=[{"file": file, "tokens": 5, "sha256": "0" * 64}])
    with pytest.raises(DataError, match="a shard lies inside its dataset"):
        load_manifest(str(dataset))


def test_no_two_shards_are_one_file(dataset: Path) -> None:
    one = {"file": "shards/00000.bin", "sha256": "0" * 64}
    edit(dataset, shards=[{**one, "tokens": 2}, {**one, "tokens": 3}])
    with pytest.raises(DataError, match="two files have the same name"):
        load_manifest(str(dataset))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", "[" * 100_000, '{"tokens": %s}' % ("9" * 5000)])
def test_a_manifest_that_is_torn_is_refused(dataset: Path, text: str) -> None:
    (dataset / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json"):
        load_manifest(str(dataset))


def test_ids_get_the_narrowest_type_that_holds_them() -> None:
    assert [dtype_for(size) for size in (1, 65_536, 65_537)] == ["uint16", "uint16", "uint32"]


def test_the_format_needs_neither_numpy_nor_torch_nor_ray() -> None:
    check = "import sys, raytide.core.io.token_dataset, raytide.core.specs.data; "
    check += "print({'numpy', 'torch', 'ray'} & {*sys.modules})"
    shown = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"


def test_an_unknown_key_of_a_spec_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="did you mean max_chars"):
        DataSpec.parse({"inputs": ["x"], "out": "y", "filter": {"max_char": 3}}, where="data.yaml")


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"inputs": []}, "inputs"),
        ({"filter": {"min_chars": 5, "max_chars": 4}}, "max_chars 4 is below min_chars 5"),
        ({"tokenizer": {}}, "exactly one of train and file"),
        ({"tokenizer": {"file": "t.json", "train": {}}}, "exactly one of train and file"),
        ({"tokenizer": {"train": {"vocab_size": 200}}}, "vocab_size"),
        ({"readers": {".log": "csv"}}, "readers"),
        ({"records": "images"}, "records"),
        ({"gang": {"shapes": [{"resources": {"GPU": 1}}]}}, "a build needs CPUs"),
        ({"workers": 0}, "workers"),
        ({"shard_tokens": 0}, "shard_tokens"),
    ],
)
def test_a_spec_that_cannot_be_built_is_refused(extra: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DataSpec.parse({"inputs": ["x"], "out": "y", **extra}, where="data.yaml")


def test_the_digest_ignores_who_builds_and_where_and_nothing_else() -> None:
    spec = DataSpec(inputs=("x",), out="y")
    inputs = [("x", 1, "v")]
    same = spec.model_copy(update={"name": "n", "team": "t", "out": "z", "workers": 9})
    assert same.digest(inputs) == spec.digest(inputs)
    assert spec.digest([("x", 2, "v")]) != spec.digest(inputs)
    assert spec.digest([("x", 1, "w")]) != spec.digest(inputs)
    for change in (
        {"seed": 1},
        {"shard_tokens": 2},
        {"format": "parquet"},
        {"text_column": "body"},
        {"records": "messages"},
        {"damaged": "drop"},
        {"texts": "jsonl"},
        {"readers": {".log": "jsonl"}},
    ):
        assert spec.model_copy(update=change).digest(inputs) != spec.digest(inputs)
    assert spec.digest(inputs, {"fastokens": "1"}) != spec.digest(inputs, {"fastokens": "2"}) != spec.digest(inputs)


def test_the_digest_of_a_dataset_of_an_earlier_release_is_known_again() -> None:
    """The value is that of raytide at 58df555a, for this spec: an upgrade builds nothing again."""
    spec = DataSpec(inputs=("x",), out="y", include=(".py",), seed=3)
    assert spec.digest([("x", 1, "v")]) == "1106ffc576eb4808c30ddd8eed2eaa6b22bccfd0852647aa0f503c84c490f334"
