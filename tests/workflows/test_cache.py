"""A stage runs again when its spec, its inputs or its code changed, and not otherwise."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from raytide.core.errors import DataError
from raytide.core.io.token_dataset import MANIFEST, Shard, Source, TokenManifest
from raytide.workflows.cache import (
    StageRecord,
    digest_of_code,
    digest_of_result,
    fingerprint_of_inputs,
    key_of,
    record_of,
    save_record,
)
from raytide.workflows.spec import FlowSpec
from raytide.workflows.state import finished, fresh

TRAIN: dict[str, Any] = {"dataset": "${text.out}", "steps": 3}


def flow_in(folder: Path, train: Mapping[str, Any] = TRAIN, **stage: Any) -> FlowSpec:
    (folder / "text").mkdir(exist_ok=True)
    stages = {
        "text": {"kind": "data", "spec": {"inputs": [str(folder / "text")]}},
        "train": {"kind": "train", "spec": dict(train), **stage},
        "note": {"kind": "script", "needs": ["train"], "spec": {"command": ["true"]}},
    }
    body = {"name": "flow", "out": str(folder / "out"), "params": {"lr": 0.1}, "stages": stages}
    return FlowSpec.parse(body, where="flow")


def key(flow: FlowSpec, name: str, digest: str = "dataset", code: str = "") -> str:
    state = finished(fresh(flow, "run"), "text", {"out": f"/anywhere/{digest}"}, {"tokens": 5.0}, digest, 0.0)
    state = finished(state, "train", {"model": "m"}, {}, f"of {digest}", 0.0)
    return key_of(flow, state, name, code)


def test_the_key_is_that_of_the_spec_the_digests_of_inputs_and_the_code(tmp_path: Path) -> None:
    flow = flow_in(tmp_path)
    assert key(flow, "train") == key(flow_in(tmp_path), "train")
    assert key(flow, "train") != key(flow, "train", digest="other")
    assert key(flow, "train") != key(flow_in(tmp_path, {**TRAIN, "steps": 4}), "train")
    assert key(flow, "note") != key(flow, "note", code="changed")
    assert key(flow, "note") != key(flow, "note", digest="other"), "a script may depend on what it only needs"


def test_where_and_for_whom_a_stage_runs_is_not_in_its_key(tmp_path: Path) -> None:
    elsewhere = flow_in(tmp_path, {**TRAIN, "name": "x", "team": "y", "spares": 1}, gang={"cpus": 4}, retries=3)
    assert key(flow_in(tmp_path), "train") == key(elsewhere, "train")


def test_parameters_and_metrics_count_by_their_values(tmp_path: Path) -> None:
    by_name = flow_in(tmp_path, {**TRAIN, "seed": "${text.metrics.tokens}", "optim": {"lr": "${params.lr}"}})
    assert key(by_name, "train") == key(flow_in(tmp_path, {**TRAIN, "seed": 5.0, "optim": {"lr": 0.1}}), "train")


def test_a_changed_input_is_new_data(tmp_path: Path) -> None:
    flow = flow_in(tmp_path)
    before = key(flow, "text"), fingerprint_of_inputs(flow)
    assert before == (key(flow, "text"), fingerprint_of_inputs(flow))
    (tmp_path / "text" / "new.txt").write_text("new")
    after = key(flow, "text"), fingerprint_of_inputs(flow)
    assert after[0] != before[0]
    assert after[1] != before[1]


def test_new_data_in_an_object_store_is_seen_by_a_driver_that_lives_on(aws: None, tmp_path: Path) -> None:
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket="corpus")
    client.put_object(Bucket="corpus", Key="in/a.txt", Body=b"one")
    flow = flow_in(tmp_path)
    text = flow.stages["text"]
    changed = text.model_copy(update={"spec": {**text.spec, "inputs": ["s3://corpus/in/*.txt"]}})
    flow = flow.model_copy(update={"stages": {**flow.stages, "text": changed}})
    before = fingerprint_of_inputs(flow)
    client.put_object(Bucket="corpus", Key="in/b.txt", Body=b"two")
    assert fingerprint_of_inputs(flow) != before


def test_an_input_that_is_missing_is_an_error_of_its_stage_and_no_error_of_the_trigger(tmp_path: Path) -> None:
    flow = flow_in(tmp_path)
    (tmp_path / "text").rmdir()
    with pytest.raises(DataError, match="text does not exist"):
        key(flow, "text")
    assert fingerprint_of_inputs(flow)


def test_a_record_counts_only_while_its_files_are_there(tmp_path: Path) -> None:
    flow = flow_in(tmp_path)
    model = tmp_path / "run" / "model"
    record = StageRecord(
        stage="train", outputs={"out": str(model.parent), "model": str(model)}, metrics={"loss": 2.5}, digest="d"
    )
    assert record_of(flow, "key") is None
    save_record(flow, "key", record)
    assert record_of(flow, "key") is None
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    assert record_of(flow, "key") == record
    (tmp_path / "out" / "results" / "key.json").write_text("{half")
    assert record_of(flow, "key") is None


def test_a_dataset_counts_by_its_bytes_not_by_when_they_were_built(tmp_path: Path) -> None:
    def digest(tokens: str, built_from: str) -> str:
        shard = Shard(file="0.bin", tokens=5, sha256=tokens * 64)
        source = Source(digest=built_from)
        manifest = TokenManifest(
            vocab_size=300, eos_id=0, dtype="uint16", documents=1, tokens=5, shards=(shard,), source=source
        )
        (tmp_path / MANIFEST).write_bytes(manifest.to_bytes())
        return digest_of_result("data", "key", {"out": str(tmp_path)})

    assert digest("a", "files of monday") == digest("a", "files of tuesday")
    assert digest("a", "files of monday") != digest("b", "files of monday")
    assert digest_of_result("train", "key", {}) == "key"


def packed(files: Mapping[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def test_only_the_files_that_a_script_names_are_its_code() -> None:
    files = {"a.py": "1", "lib/b.py": "2", "notes.txt": "3"}
    changed = {**files, "notes.txt": "4"}
    assert digest_of_code(packed(files), ("*",)) != digest_of_code(packed(changed), ("*",))
    assert digest_of_code(packed(files), ("*.py",)) == digest_of_code(packed(changed), ("*.py",))
    assert digest_of_code(packed(files), ("lib/*",)) != digest_of_code(packed({"lib/b.py": "5"}), ("lib/*",))


def test_every_file_that_a_training_reads_counts(tmp_path: Path) -> None:
    file = tmp_path / "read.jsonl"
    for spec in (
        {"steps": 3, "chat": {"file": str(file)}},
        {**TRAIN, "eval": {"dataset": str(file)}},
        {"steps": 3, "dataset": {"sources": [{"dataset": "${text.out}"}, {"dataset": str(file)}]}},
    ):
        file.write_text("one")
        before = key(flow_in(tmp_path, spec), "train")
        file.write_text("another")
        assert key(flow_in(tmp_path, spec), "train") != before, spec


def test_a_file_below_another_stages_result_is_no_input_from_outside(tmp_path: Path) -> None:
    stages = {
        "get": {"kind": "script", "spec": {"command": ["true"]}},
        "text": {"kind": "data", "spec": {"inputs": ["${get.out}/part.jsonl"]}},
    }
    flow = FlowSpec.parse({"name": "flow", "out": str(tmp_path), "stages": stages}, where="flow")
    assert key_of(flow, finished(fresh(flow, "run"), "get", {"out": "/x"}, {}, "digest", 0.0), "text", "")
