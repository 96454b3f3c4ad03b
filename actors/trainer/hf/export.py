"""Exports a model as a Hugging Face directory. transformers, vLLM and the native engine can load the directory.

Rank 0 receives one parameter at a time and writes file by file, so that it never holds the whole model.
"""

from __future__ import annotations

import glob
import json
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor

from raytide.actors.models.chat_template import ChatTemplate
from raytide.actors.models.model_config import Fields, read_json
from raytide.actors.models.quantized.targets import QAT_RECORD
from raytide.actors.models.tokenizer_files import chat_template, tokenizer_files
from raytide.actors.trainer.checkpoint.async_save import Commit
from raytide.actors.trainer.data.token_dataset import TokenDataset
from raytide.actors.trainer.distributed.process_group import ProcessGroup
from raytide.actors.trainer.hf.model_source import ModelSource
from raytide.actors.trainer.hf.peft_adapter import adapter_config, file_adapters
from raytide.actors.trainer.hf.safetensors_writer import ShardedSafetensorsWriter, save
from raytide.actors.trainer.hf.weight_mapping import FamilyFormat, FileTensor, file_tensors, to_hf_tensor
from raytide.actors.trainer.model.lora import LORA_A, LORA_B, adapted, merged
from raytide.actors.trainer.model.precision import export_dtype
from raytide.actors.trainer.model.transformer import Transformer
from raytide.core.errors import RaytideError, StorageError
from raytide.core.io.private_folder import temporary_folder
from raytide.core.io.private_paths import safe_opener
from raytide.core.io.storage import full_disk_is_an_error, is_local, join, named_failures
from raytide.core.specs.model import LoraSpec
from raytide.core.specs.train import TrainSpec

_GB = 1e9
_CONFIGS = ("config.json", "adapter_config.json")
_GENERATION = "generation_config.json"
_ANSWER = "\uf8ff"
"""An answer for a template to render: a private-use character, which no template treats specially."""


def export(
    parts: Sequence[Transformer],
    spec: TrainSpec,
    origin: ModelSource,
    data: TokenDataset,
    group: ProcessGroup,
    commit: Commit = nullcontext,
) -> str:
    """Writes `out`/model and, if adapters were trained, `out`/adapter. Each directory is written atomically. Returns
    the path or URL of the model. All ranks must call it together.
    """
    parameters = FullParameters(parts, group)
    if spec.finetune is not None:
        _export_adapter(parameters, spec, spec.finetune.lora, origin, group, commit)
    return _export_model(parameters, spec, origin, data, group, commit)


def _export_model(
    parameters: FullParameters,
    spec: TrainSpec,
    origin: ModelSource,
    data: TokenDataset,
    group: ProcessGroup,
    commit: Commit,
) -> str:
    tensors, dtype = file_tensors(origin.arch, FamilyFormat.on_the_hub(origin.arch)), export_dtype(spec)
    files = ShardedSafetensorsWriter(tensors, dtype, spec.export_shard_gb * _GB)
    target = join(spec.out, "model")
    directory = AtomicDirectory(target, commit) if group.is_first else None
    try:
        for name, tensor in _contents(tensors, parameters, spec, origin):
            if directory is not None:
                assert tensor is not None
                directory.write(partial(files.add, name=name, tensor=tensor))
    except BaseException:
        if directory is not None:
            directory.discard()
        raise
    if directory is not None:
        directory.write(files.close)
        directory.write(lambda folder: _copy_tokenizer_files(folder, origin, data, spec, dtype))
    return _publish(directory, target, group)


def _export_adapter(
    parameters: FullParameters,
    spec: TrainSpec,
    lora: LoraSpec,
    origin: ModelSource,
    group: ProcessGroup,
    commit: Commit,
) -> None:
    adapters, weights = file_adapters(origin.arch, lora), dict[str, Tensor]()
    for adapter in adapters:
        full = {name: parameters.gather(name) for name in adapter.parameters}
        if group.is_first:
            here = {name: each for name, each in full.items() if each is not None}
            for kind, tensor in zip("AB", adapter.pair(here.__getitem__), strict=True):
                weights[f"base_model.model.{adapter.module}.lora_{kind}.weight"] = tensor.to(export_dtype(spec))
    target = join(spec.out, "adapter")
    directory = AtomicDirectory(target, commit) if group.is_first else None
    if directory is not None:
        directory.write(lambda folder: save(weights, folder / "adapter_model.safetensors"))
        config = adapter_config(origin.arch, lora, adapters, str(origin.folder))
        directory.write(lambda folder: _json(folder / "adapter_config.json", config))
    _publish(directory, target, group)


def _contents(
    tensors: Sequence[FileTensor], parameters: FullParameters, spec: TrainSpec, origin: ModelSource
) -> Iterator[tuple[str, Tensor | None]]:
    """Yields the name of each tensor of the files and, on rank 0, the tensor. A parameter is gathered once and kept
    until no further tensor needs it.
    """
    lora = None if spec.finetune is None else spec.finetune.lora
    changed = set() if lora is None else set(adapted(origin.arch, lora))
    uses_left = Counter(piece.parameter for tensor in tensors for piece in tensor.slices)
    gathered: dict[str, Tensor] = {}
    for tensor in tensors:
        for piece in tensor.slices:
            if piece.parameter not in gathered:
                path = piece.parameter.removesuffix(".weight")
                full = _full_parameter(parameters, piece.parameter, path, lora if path in changed else None)
                gathered[piece.parameter] = torch.empty(0) if full is None else full
        yield tensor.name, None if not parameters.is_first else to_hf_tensor(tensor, gathered.__getitem__)
        for piece in tensor.slices:
            uses_left[piece.parameter] -= 1
            if not uses_left[piece.parameter]:
                del gathered[piece.parameter]


def _full_parameter(parameters: FullParameters, name: str, path: str, lora: LoraSpec | None) -> Tensor | None:
    """Returns the whole parameter on rank 0, with its adapter (if any) merged in; None on other ranks."""
    weight = parameters.gather(name)
    if lora is None:
        return weight
    a_RI, b_OR = parameters.gather(f"{path}.{LORA_A}"), parameters.gather(f"{path}.{LORA_B}")
    if weight is None or a_RI is None or b_OR is None:
        return None
    return merged(weight, a_RI, b_OR, lora)


def _copy_tokenizer_files(
    folder: Path, origin: ModelSource, data: TokenDataset, spec: TrainSpec, dtype: torch.dtype
) -> None:
    """Copies config, tokenizer and chat template, preferably the initial model's, and writes the scheme of QAT."""
    key = "dtype" if "dtype" in origin.config else "torch_dtype"
    _json(folder / "config.json", {**origin.config, key: str(dtype).removeprefix("torch.")})
    if spec.qat is not None:
        _json(folder / QAT_RECORD, spec.qat.model_dump(mode="json"))
    own = {} if origin.folder is None else tokenizer_files(origin.folder)
    files = {**own, **data.files} if spec.other_tokenizer else {**data.files, **own}
    for name, source in {**files, **data.template}.items():
        with open(source, "rb", opener=safe_opener) as read, open(folder / name, "xb") as written:
            shutil.copyfileobj(read, written)
    if _GENERATION not in files:
        eos = origin.config.get("eos_token_id")
        _json(folder / _GENERATION, {"bos_token_id": origin.config.get("bos_token_id"), "eos_token_id": eos})
    _end_answers(folder)


def _end_answers(folder: Path) -> None:
    """Adds the token with which the chat template ends an answer to the end tokens of the generation config. A base
    model's files name only the token that ends a text, which a model that has learned to chat does not write.
    """
    try:
        end, body = _end_of_answers(folder), read_json(folder / _GENERATION)
        ends = Fields(body, _GENERATION).ids("eos_token_id")
        ends = ends or Fields(read_json(folder / "config.json"), "config.json").ids("eos_token_id")
    except (RaytideError, AttributeError, KeyError, TypeError):  # no usable template, or files that nothing reads
        return
    if end is not None and end not in ends:
        _json(folder / _GENERATION, {**body, "eos_token_id": [*ends, end]})


def _end_of_answers(folder: Path) -> int | None:
    """Returns the special token that follows an answer in the folder's chat template; None if there is none."""
    paths = [folder / "tokenizer_config.json", folder / "tokenizer.json"]
    config, tokenizer = (read_json(path) if path.is_file() else {} for path in paths)
    names = {key: config.get(key) for key in ("bos_token", "eos_token")}
    specials = {key: (each.get("content") if isinstance(each, dict) else each) or "" for key, each in names.items()}
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER}]
    if (source := chat_template(folder, config)) is None:
        return None
    text, ranges = ChatTemplate(source, specials).answers(talk)
    _, found, rest = text[slice(*ranges[-1])].rpartition(_ANSWER)
    added = [each for each in tokenizer.get("added_tokens", []) if each["special"] and each["content"] in rest]
    places = {rest.find(each["content"]): int(each["id"]) for each in added if found}
    return places[min(places)] if places else None


def _publish(directory: AtomicDirectory | None, target: str, group: ProcessGroup) -> str:
    failed = group.from_first(None if directory is None else directory.publish())
    if failed is not None:
        raise failed
    return target


def _json(path: Path, body: Mapping[str, object]) -> None:
    path.write_text(json.dumps(body, indent=2) + "\n")


class FullParameters:
    """Gathers full parameters from all ranks, one after another.

    All ranks must gather the same parameters in the same order. Only rank 0 receives them.
    """

    def __init__(self, parts: Sequence[Transformer], group: ProcessGroup) -> None:
        self._group, self.is_first = group, group.is_first
        self._local = {name: parameter for part in parts for name, parameter in part.named_parameters()}
        held: list[dict[str, torch.Size]] = [{} for _ in range(group.world)]
        dist.all_gather_object(held, {name: each.shape for name, each in self._local.items()}, group=group.io)
        self._owner = {name: rank for rank in reversed(range(group.world)) for name in held[rank]}
        self._shape = {name: shape for shapes in held for name, shape in shapes.items()}

    @torch.no_grad()
    def gather(self, name: str) -> Tensor | None:
        """Returns the whole parameter on rank 0, in float32 on the CPU. Returns None on other ranks.

        The ranks that hold the parameter's shards combine them. The lowest of these ranks sends the result to rank 0.
        """
        dist.barrier(group=self._group.io)  # rank 0 may write a file for longer than the collective timeout
        parameter, owner = self._local.get(name), self._owner[name]
        full: Tensor | None = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if self._group.rank == owner:
            assert full is not None
            full = full.detach().float().cpu().contiguous()
            if owner != 0:
                dist.send(full, 0, group=self._group.io)
        if self._group.rank != 0:
            return None
        if owner != 0:
            full = torch.empty(self._shape[name])
            dist.recv(full, owner, group=self._group.io)
        return full


class AtomicDirectory:
    """A directory that appears at its target as a whole or not at all.

    Files are written to a hidden directory beside the target, or to a local directory if the target is a URL.
    `publish` then moves or uploads the directory to the target. If killed writers left hidden directories beside the
    target, these are removed before the first write. Leftovers are removed, and the target is replaced, only while
    the context manager `commit` is open.

    The first error is kept until `publish` returns it, because other ranks may still be sending tensors.
    """

    def __init__(self, target: str, commit: Commit = nullcontext) -> None:
        self._target, self._commit = target, commit
        self._folder: Path | None = None
        self._error: RaytideError | None = None

    def write(self, work: Callable[[Path], None]) -> None:
        """Calls `work` with the path of the temporary directory, unless an earlier call failed."""
        if self._error is not None:
            return
        try:
            if self._folder is None:
                with full_disk_is_an_error(self._place):
                    self._folder = self._create_folder()
            with full_disk_is_an_error(self._place):
                work(self._folder)
        except SafetensorError as error:
            self._fail(StorageError(f"cannot write {self._place}: {error}.", hint="Free space there, then resume."))
        except RaytideError as error:
            self._fail(error)
        except BaseException:
            self.discard()
            raise

    def publish(self) -> RaytideError | None:
        """Replaces the target while the context manager `commit` is open. Returns the first error, or None.

        If the error occurs before the replacement begins, the target stays unchanged. If an upload breaks off, the
        target has no config. Readers therefore do not mistake it for a model. If a local replacement breaks off, the
        target is incomplete or missing.
        """
        try:
            with self._commit():
                self.write(self._replace if is_local(self._target) else self._upload)
        except RaytideError as error:
            self._fail(error)
        except BaseException:
            self.discard()
            raise
        return self._error

    def discard(self) -> None:
        """Removes the temporary directory."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _place(self) -> str:
        """The place whose disk is full if a write fails: a local directory even if the target is a URL."""
        return self._target if is_local(self._target) else str(self._folder or "a temporary directory")

    def _create_folder(self) -> Path:
        if not is_local(self._target):
            return temporary_folder("exports")
        target = Path(self._target)
        with self._commit():
            for left in target.parent.glob(f".{glob.escape(target.name)}.{'[0-9a-f]' * 8}.part"):
                shutil.rmtree(left, ignore_errors=True)
        folder = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")
        folder.mkdir(parents=True)
        return folder

    def _replace(self, folder: Path) -> None:
        target = Path(self._target)
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)

    def _upload(self, folder: Path) -> None:
        """Uploads the files, the config last: object stores cannot rename, and without a config nothing is a model."""
        from raytide.core.io.storage import open_url, remove_tree

        with full_disk_is_an_error(self._target), named_failures(self._target):
            fs, path = open_url(self._target)
            if fs.exists(path):
                remove_tree(self._target)
            for file in sorted(folder.iterdir(), key=lambda each: (each.name in _CONFIGS, each.name)):
                fs.put_file(str(file), f"{path}/{file.name}")
        self.discard()

    def _fail(self, error: RaytideError) -> None:
        self._error = error
        self.discard()
