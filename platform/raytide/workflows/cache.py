"""The keys under which the results of finished stages are found again, and the records of these results.

The key of a stage covers everything that determines the result: the stage's kind and spec, the digests of the results
that it uses, its code, and the files that it reads from outside the flow. The key does not cover the gang or the team.
The folder of the results is named after the key. Different results thus never overwrite each other, and an attempt that
continues an earlier attempt finds the earlier checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from io import BytesIO
from typing import Any

from pydantic import Field

from raytide.core.config import Config
from raytide.core.errors import DataError
from raytide.core.io.storage import exists, join, open_url, read_bytes, sha256, write_bytes
from raytide.core.io.token_dataset import MANIFEST, load_manifest
from raytide.core.specs.data import DataSpec
from raytide.pipelines.inputs import find_inputs, version_of
from raytide.workflows.references import METRICS, PARAMS, Reference, references_in, resolved
from raytide.workflows.spec import FlowSpec, StageSpec
from raytide.workflows.state import FlowState

_FORMAT = 1
_KEY_CHARS = 16
_WITHOUT_EFFECT = frozenset({"name", "team", "gang", "workers", "stall_timeout_s", "spares", "collective_timeout_s"})
"""Fields of DataSpec and TrainSpec that do not affect the result."""
_SUITE = ("parent", "corpora.*.path", "tasks.folder")
_READ = {
    "data": (
        "tokenizer.file",
        "cleaning.rules.perplexity.model",
        "cleaning.sources.*.perplexity.model",
        "cleaning.near_duplicates.against.*",
        "cleaning.decontaminate.sets.*",
    ),
    "train": (
        *("dataset", "dataset.sources.*.dataset", "init_from", "model.config", "distill.teacher", "eval.dataset"),
        *("chat.file", "chat.tokenizer", "chat.template"),
    ),
    "compress": ("model", "calibration.path", *(f"quality.{field}" for field in _SUITE)),
    "eval": ("model", "dataset", "prompts", *(f"suite.{field}" for field in _SUITE)),
    "register": ("model",),
}
"""Fields of specs that name files to read; `*` stands for every element of a list or mapping."""


class StageRecord(Config):
    """The outputs and metrics of a finished stage. It is stored in `out`/results/KEY.json."""

    stage: str
    job: str = ""
    outputs: dict[str, str] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)
    digest: str


def key_of(flow: FlowSpec, state: FlowState, name: str, code: str) -> str:
    """Returns the key of a stage, a SHA-256 in hex. All stages that this stage needs must be done. `code` is the digest
    of a script stage's files.

    A script may have side effects. The key of a script stage therefore also covers the stage's name and the stages
    in its `needs`.
    """
    stage = flow.stages[name]

    def lookup(reference: Reference) -> object:
        if reference.stage == PARAMS:
            return flow.params[reference.name]
        before = state.stages[reference.stage]
        kind, _, metric = reference.name.partition(".")
        return before.metrics[metric] if kind == METRICS else f"{reference.name} of {before.digest}"

    spec = resolved(stage.spec, lookup)
    assert isinstance(spec, dict)  # as the stage's spec is
    if stage.kind in ("data", "train"):
        spec = {field: value for field, value in spec.items() if field not in _WITHOUT_EFFECT}
    sweep = None if stage.sweep is None else stage.sweep.model_dump(mode="json", exclude={"at_once"})
    own = [name, *(state.stages[needed].digest for needed in stage.needs)] if stage.kind == "script" else []
    body = [_FORMAT, stage.kind, spec, sweep, code, own, _read_from_outside(flow, stage)]
    return sha256(json.dumps(body, sort_keys=True, default=str).encode())


def folder_of(flow: FlowSpec, name: str, key: str) -> str:
    """Returns the folder for the results of a stage."""
    return join(flow.out, name, key[:_KEY_CHARS])


def record_of(flow: FlowSpec, key: str) -> StageRecord | None:
    """Returns the record of the finished stage with this key. Returns None if there is no record, or if the stage's
    results no longer exist.
    """
    url = join(flow.out, "results", f"{key}.json")
    try:
        record = StageRecord.parse(json.loads(read_bytes(url)), where=url)
    except (DataError, ValueError):
        return None
    return record if _is_there(record) else None


def save_record(flow: FlowSpec, key: str, record: StageRecord) -> None:
    write_bytes(join(flow.out, "results", f"{key}.json"), record.model_dump_json(indent=1).encode())


def digest_of_result(kind: str, key: str, outputs: Mapping[str, str]) -> str:
    """Returns the digest of a stage's result. The keys of later stages contain this digest.

    For a dataset, the result's digest is the digest of the shards and the tokenizer. If the dataset is rebuilt with
    the same bytes, the stages that use the dataset therefore do not run again. For any other result, the digest is
    the stage's key.
    """
    if kind != "data":
        return key
    manifest = load_manifest(outputs["out"])
    shards = [[shard.file, shard.tokens, shard.sha256] for shard in manifest.shards]
    return sha256(json.dumps([shards, manifest.tokenizer_sha256]).encode())


def digest_of_code(package: bytes, patterns: Iterable[str]) -> str:
    """Returns the digest of those files in a packed working directory whose names match one of the patterns."""
    chosen, files = tuple(patterns), []
    with zipfile.ZipFile(BytesIO(package)) as archive:
        for entry in sorted(archive.infolist(), key=lambda each: each.filename):
            if any(fnmatch(entry.filename, pattern) for pattern in chosen):
                files.append([entry.filename, hashlib.sha256(archive.read(entry)).hexdigest()])
    return sha256(json.dumps(files).encode())


def fingerprint_of_inputs(flow: FlowSpec) -> str:
    """Returns a digest of the names, sizes and versions of all files that data stages read from outside the flow.

    An input that does not exist yet counts as an empty set of files.
    """
    found = []
    for name, stage in flow.stages.items():
        if stage.kind == "data":
            with suppress(DataError):
                found.append([name, *_read_from_outside(flow, stage)])
    return sha256(json.dumps(found, default=str).encode())


def _read_from_outside(flow: FlowSpec, stage: StageSpec) -> list[Any]:
    """Returns the names, sizes and versions of the files that a stage reads from outside the flow."""
    found: list[Any] = []
    if stage.kind == "data" and (literal := list(_named(flow, stage.spec, "inputs.*"))):
        chosen = {field: list(_named(flow, stage.spec, f"{field}.*")) for field in ("include", "exclude")}
        data = DataSpec.parse({**chosen, "inputs": literal, "out": flow.out}, where="inputs")
        found += [[each.url, each.size, each.version] for each in find_inputs(data)]
    for path in _READ.get(stage.kind, ()):
        found += [_listing(url) for url in _named(flow, stage.spec, path)]
    return found


def _named(flow: FlowSpec, value: object, path: str) -> Iterator[str]:
    """Yields the texts at a path of a spec, except those that refer to stages, whose results count by their digests."""
    first, _, rest = path.partition(".")
    if not path:
        if isinstance(value, str) and all(each.stage == PARAMS for each in references_in(value)):
            text = resolved(value, lambda each: flow.params[each.name])
            if isinstance(text, str) and text:
                yield text
    elif first == "*":
        for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
            yield from _named(flow, each, rest)
    elif isinstance(value, Mapping):
        yield from _named(flow, value.get(first), rest)


def _listing(url: str) -> list[Any]:
    """Returns the names, sizes and versions of the files at a URL; for a dataset, only the digest of its manifest."""
    if "@" in url:
        return [url]
    fs, path = open_url(url)
    fs.invalidate_cache()  # the driver lives long, and has listed the folder before
    if not exists(url):
        return [url]
    if exists(manifest := join(url, MANIFEST)):
        return [url, sha256(read_bytes(manifest))]
    found = fs.find(path, detail=True)
    return [
        url,
        *sorted([name, int(info.get("size") or 0), version_of(info)] for name, info in found.items()),
    ]


def _is_there(record: StageRecord) -> bool:
    """Returns whether the files of a result still exist: for a model its config, otherwise the folder."""
    out, model = record.outputs.get("out"), record.outputs.get("model")
    if model is not None and not exists(join(model, "config.json")):
        return False
    return out is None or exists(out)
