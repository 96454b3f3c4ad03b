"""Resolves a run's model: its config and, if it has initial weights, their directory."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from raytide.actors.models.architecture import Architecture
from raytide.actors.models.content import content_digest
from raytide.actors.models.families import architecture_of
from raytide.actors.models.model_cache import staged_model
from raytide.actors.models.model_config import read_json
from raytide.actors.models.quantized.quantization_config import read_quantization
from raytide.actors.models.tokenizer_files import tokenizer_digest
from raytide.actors.trainer.data.mixture_dataset import open_tokens
from raytide.actors.trainer.data.token_dataset import TokenDataset
from raytide.core.errors import ConfigError, DataError
from raytide.core.io.storage import join, local_path
from raytide.core.specs.train import TrainSpec

_ADDED = ("num_labels", "vision")
"""The fields that releases have added to Architecture, in this order. Add each further field here: otherwise no
checkpoint of an earlier release can be resumed.
"""


@dataclass(frozen=True, slots=True)
class ModelSource:
    config: Mapping[str, object]
    """The contents of a Hugging Face `config.json`, however the spec gave it."""
    arch: Architecture
    folder: Path | None
    """Directory of the initial weights; None for random ones."""
    digest: str
    """Digest of what a resume must match: the architecture, the choice of the trained weights, the initial weights'
    content, the data order, and the options of distillation and QAT.
    """
    earlier_digests: frozenset[str] = frozenset()
    """Digests of the same in checkpoints of earlier releases, whose architectures had fewer fields."""


def resolve_model(spec: TrainSpec, data: TokenDataset) -> ModelSource:
    """Returns the run's model: its config, architecture and initial weights. Raises ConfigError if model, data and spec
    do not fit each other, and DataError for unreadable files.
    """
    folder = None if spec.init_from is None else model_folder(spec.init_from)
    config, where = _config(spec, data, folder)
    refuse_quantized(config, where)
    arch = architecture_of(config, where)
    _check(spec, data, arch, where)
    if folder is not None and not spec.other_tokenizer:
        _check_tokenizer(folder, data)
    return ModelSource(config, arch, folder, *_digests(spec, arch, folder))


def refuse_quantized(config: Mapping[str, object], where: str) -> None:
    """Raises ConfigError for a model with quantized weights, which cannot be trained or merged with adapters."""
    if read_quantization(config, where) is not None:
        raise ConfigError(
            f"{where}: quantized weights cannot be trained.", hint="Train the model that they were made from."
        )


def model_folder(init_from: str) -> Path:
    """Returns the model directory for `init_from`, which is a model directory or the folder of a run that exported a
    model. For a URL, returns a copy on this node.
    """
    if local_path(init_from) is None:
        return _copied(init_from)
    folders = [Path(init_from), Path(init_from) / "model"]
    for folder in folders:
        if (folder / "config.json").is_file():
            return folder
    raise DataError(
        f"{init_from} holds no model: neither it nor its model folder has a config.json.",
        hint="Point at a Hugging Face model directory, or at a finished run.",
    )


@functools.cache
def _copied(url: str) -> Path:
    """Returns a local copy of a directory. It is not deleted while this process lives."""
    try:
        return Path(staged_model(url).path)
    except DataError as error:
        try:
            return Path(staged_model(join(url, "model")).path)
        except DataError:
            raise error from None


def _config(spec: TrainSpec, data: TokenDataset, folder: Path | None) -> tuple[dict[str, object], str]:
    given = spec.model.config
    if folder is not None:
        replaced = given if isinstance(given, dict) else {}
        return {**read_json(folder / "config.json"), **replaced}, str(folder / "config.json")
    if given is None:
        return spec.model.hf_config(data.vocab_size, data.eos_id), f"model of {spec.name}"
    if isinstance(given, str):
        path = Path(given) / "config.json" if Path(given).is_dir() else Path(given)
        body, where = read_json(path), str(path)
    else:
        body, where = dict(given), "model.config"
    own = {"vocab_size": data.vocab_size, "bos_token_id": data.eos_id, "eos_token_id": data.eos_id}
    return own | body, where


def _check(spec: TrainSpec, data: TokenDataset, arch: Architecture, where: str) -> None:
    replaced = spec.model.config if isinstance(spec.model.config, dict) else {}
    # Gemma 3's own tokenizer has a token for images, for which its text models have no row.
    is_own = spec.init_from is not None and not spec.other_tokenizer and "vocab_size" not in replaced
    if arch.vocab_size < data.vocab_size and not is_own:
        raise ConfigError(
            f"{where} has a vocab_size of {arch.vocab_size}, below the {data.vocab_size} of {data.name}.",
            hint="Leave vocab_size out to take the data's, or encode the data with the model's own tokenizer.",
        )
    if arch.max_model_len < spec.seq_len:
        raise ConfigError(
            f"seq_len {spec.seq_len} is above the {arch.max_model_len} positions of {where}.",
            hint="Lower seq_len, or stretch the positions by model.config.",
        )
    layout, balanced = spec.layout, arch.experts is not None and arch.experts.balance > 0
    if balanced and layout.pipeline * layout.context * layout.tensor > 1:
        raise ConfigError(
            "the router's load-balancing loss needs all layers and whole sequences on each rank.",
            hint="Use only the replicate and shard axes, or set output_router_logits to false in model.config.",
        )
    if balanced and spec.memory.compile and spec.memory.checkpointing != "none":
        raise ConfigError(
            "the router's load-balancing loss cannot be compiled together with activation checkpointing.",
            hint="Remove memory.compile or memory.checkpointing.",
        )


def _check_tokenizer(folder: Path, data: TokenDataset) -> None:
    model_tokenizer, data_tokenizer = folder / "tokenizer.json", data.tokenizer_file
    if not model_tokenizer.is_file() or tokenizer_digest(model_tokenizer) != tokenizer_digest(data_tokenizer):
        raise ConfigError(
            f"{data.name} was made with another tokenizer ({data_tokenizer}) than the model's own ({model_tokenizer}).",
            hint="Build the dataset with the model's tokenizer.json, or set other_tokenizer if the ids mean the same.",
        )


def _digests(spec: TrainSpec, arch: Architecture, folder: Path | None) -> tuple[str, frozenset[str]]:
    """Returns the digest that a resume must match, and the digests that earlier releases computed in its place."""
    known = {key: value for key, value in asdict(arch).items() if key != "dtype"}
    body = {
        "arch": known,
        "finetune": None if spec.finetune is None else spec.finetune.model_dump(),
        "order": spec.digest(),
        "first_weights": None if folder is None else content_digest(folder),
    }
    if spec.distill is not None:
        body["distill"] = spec.distill.model_dump(exclude={"teacher", "cache"}) | {
            "teacher": content_digest(model_folder(spec.distill.teacher))
        }
    if spec.qat is not None:
        body["qat"] = spec.qat.model_dump()
    present, earlier = _hash(body), set[str]()
    defaults = {each.name: each.default for each in fields(Architecture)}
    for name in reversed(_ADDED):
        if known.pop(name) != defaults[name]:
            break
        earlier.add(_hash(body))
    return present, frozenset(earlier)


def _hash(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def open_data(spec: TrainSpec) -> TokenDataset:
    """Opens the dataset or the chat conversations that a spec trains on."""
    if spec.chat is None:
        return open_tokens(spec)
    from raytide.actors.trainer.data.chat_dataset import ChatDataset  # needs tokenizers

    tokenizer = Path(spec.chat.tokenizer) if spec.chat.tokenizer else model_folder(spec.init_from or "")
    return ChatDataset(spec.chat, tokenizer, spec.seq_len)
