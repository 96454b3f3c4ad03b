"""LoRA adapters (Hu et al. 2021) in PEFT's directory format. For requests that use an adapter, this product is added to
a projection's output:

    y += (x A^T) B^T * scale

One batch may use several adapters. Each adapter then applies to its own spans of the step's rows. The model stacks
some projections, such as q, k and v. The adapter's matrices are stacked in the same way, so that the stack takes
only two matrix products. A batch without adapters does no extra work.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Protocol

import torch

from raytide.actors.engine.sequence import ScheduledChunk
from raytide.actors.models.architecture import Architecture
from raytide.actors.models.loader import Weights
from raytide.actors.models.model_config import Fields, read_json
from raytide.actors.models.naming import NAMES, projections
from raytide.core.errors import CapacityError, ConfigError, ConflictError, DataError, NotFoundError
from raytide.core.io.private_paths import safe_opener
from raytide.kernels.registry import Ops

Tensor = torch.Tensor
Linear = Callable[[Tensor], Tensor]
_Place = tuple[int, str]  # the layer and the projection

_MAX_RANK = 256
_CUT_BY_INPUT = frozenset({"attention_out", "down"})


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded LoRA adapter. `deltas` has a function for each projection. The function gets the projection's input, and
    its result is added to the projection's output. `number` identifies the adapter among the processes of one engine.
    """

    deltas: Mapping[_Place, Linear]
    number: int = 0


@dataclass(frozen=True, slots=True)
class LoraRows:
    """The spans of a step's flat batch that use an adapter. Each span has its adapter, its first row and its end. The
    end is the row after the last row of the span.
    """

    spans: list[tuple[Adapter, int, int]]

    @classmethod
    def of(cls, lengths: Iterable[tuple[Adapter | None, int]]) -> LoraRows | None:
        """Returns the spans of a batch, or None if no sequence has an adapter. `lengths` has the adapter and the number
        of rows of each sequence, in order. Neighbouring sequences with the same adapter share a span.
        """
        spans: list[tuple[Adapter, int, int]] = []
        start = 0
        for adapter, length in lengths:
            if adapter is not None:
                joins = bool(spans) and spans[-1][0] is adapter and spans[-1][2] == start
                first = spans.pop()[1] if joins else start
                spans.append((adapter, first, start + length))
            start += length
        return cls(spans) if spans else None

    def add(self, layer: int, projection: str, x_TN: Tensor, y_TM: Tensor) -> None:
        """Adds the adapters' results to a projection's output `y_TM`, in place."""
        for adapter, start, end in self.spans:
            delta = adapter.deltas.get((layer, projection))
            if delta is not None:
                y_TM[start:end] += delta(x_TN[start:end])


@dataclass(frozen=True, slots=True)
class _Target:
    """A module's place in its stacked projection: the `rows` rows from row `first`."""

    place: _Place
    first: int
    rows: int
    columns: int


class AdapterPart(Protocol):
    """One process's part of an adapter, for a model that several processes share (see `AdapterShard`)."""

    arch: Architecture
    layers: range

    def cut(self, module: str, a_RN: Tensor, b_MR: Tensor) -> tuple[Tensor, Tensor]: ...

    def sum(self, partial_TR: Tensor) -> Tensor: ...


def read_adapter(
    path: Path,
    arch: Architecture,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    part: AdapterPart | None = None,
    number: int = 0,
) -> Adapter:
    """Reads an adapter, or only one process's `part` of it. Raises DataError if the adapter is for another model.
    Raises ConfigError for an unsupported type of adapter.
    """
    config_path = path / "adapter_config.json"
    config = Fields(read_json(config_path), str(config_path))
    _refuse_other_kinds(config)
    weights = Weights(path, dtype, device)
    targets, found = _targets(arch), dict[_Place, list[tuple[_Target, Tensor, Tensor]]]()
    own = targets if part is None else _targets(part.arch)
    is_empty = True
    for name in weights.names:
        named = _module(name, path)
        module = named.removeprefix(NAMES[arch.names].root)
        if name.endswith("lora_B.weight"):
            continue
        target = targets.get(module)
        if target is None:
            raise ConfigError(
                f"{path}: no adapter can be put on {module} here.", hint=f"Adapters may target {_kinds(targets)}."
            )
        a_RN, b_MR = _pair(weights, name, target, path)
        is_empty = False
        b_MR = (b_MR.float() * _scale(config, named, a_RN.shape[0])).to(dtype)
        if part is not None and target.place[0] not in part.layers:
            continue
        if part is not None:
            a_RN, b_MR = part.cut(module, a_RN, b_MR)
        found.setdefault(target.place, []).append((own[module], a_RN, b_MR))
    if is_empty:
        raise DataError(f"{path} holds no adapter weights.", hint="Save the adapter with PEFT's save_pretrained.")
    sizes = {target.place: 0 for target in own.values()}
    for target in own.values():
        sizes[target.place] += target.rows
    total = None if part is None else part.sum
    return Adapter({place: _delta(place, parts, sizes[place], ops, total) for place, parts in found.items()}, number)


def adapter_digest(path: Path) -> str:
    """Returns a hash of the whole content of an adapter's files. Raises DataError if a file cannot be read."""
    digest = blake2b(digest_size=16)
    for file in (path / "adapter_config.json", *sorted(path.glob("*.safetensors"))):
        try:
            with open(file, "rb", opener=safe_opener) as content:
                digest.update(file_digest(content, "blake2b").digest())
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error}.", hint="Point at a directory that PEFT wrote.") from None
    return digest.hexdigest()


def _delta(
    place: _Place,
    parts: list[tuple[_Target, Tensor, Tensor]],
    size: int,
    ops: Ops,
    total: Callable[[Tensor], Tensor] | None,
) -> Linear:
    """Returns a function that computes all adapters of a stacked projection's parts with one pair of products; B is
    zero outside a part's rows. `total` sums the first product over processes that each have some of the inputs.
    """
    down = ops.linear(torch.cat([a_RN for _, a_RN, _ in parts]), None)
    b_MR = parts[0][2].new_zeros(size, sum(a_RN.shape[0] for _, a_RN, _ in parts))
    column = 0
    for target, a_RN, part_MR in parts:
        b_MR[target.first : target.first + target.rows, column : column + a_RN.shape[0]] = part_MR
        column += a_RN.shape[0]
    up = ops.linear(b_MR, None)
    if total is None or place[1] not in _CUT_BY_INPUT:
        return lambda x: up(down(x))
    return lambda x: up(total(down(x)))


def _pair(weights: Weights, name: str, target: _Target, path: Path) -> tuple[Tensor, Tensor]:
    rank = next(iter(weights.shape(name)), 0)
    if rank > _MAX_RANK:
        raise ConfigError(f"{path}: rank {rank} is not supported.", hint=f"Up to {_MAX_RANK}.")
    other = name.replace("lora_A.weight", "lora_B.weight")
    return weights.get(name, rank, target.columns), weights.get(other, target.rows, rank)


def _module(name: str, path: Path) -> str:
    """Returns the path of the module that a key `base_model.model.<path>.lora_A.weight` names."""
    match = re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", name)
    if match is None:
        raise ConfigError(
            f"{path}: weight {name} is not supported.", hint="Only lora_A and lora_B of linear modules are supported."
        )
    return match[1]


def _targets(arch: Architecture) -> dict[str, _Target]:
    names, targets = NAMES[arch.names], dict[str, _Target]()
    for index in range(arch.num_layers):
        for kind, projection in projections(arch, index).items():
            first = 0
            for module, rows in zip(projection.paths, projection.rows, strict=True):
                at = names.layer.format(index) + module
                targets[at] = _Target((index, kind), first, rows, projection.columns)
                first += rows
    return targets


def _kinds(targets: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(target.rsplit(".", 1)[-1] for target in targets))


def _scale(config: Fields, module: str, rank: int) -> float:
    """Returns PEFT's scale: alpha / rank, or alpha / sqrt(rank) for rank-stabilized adapters (Kalajdzievski 2023).

    `module` is the module's whole path, because the patterns of `alpha_pattern` may be anchored at its beginning.
    """
    patterns = config.section("alpha_pattern")
    pattern = next((each for each in patterns.body if re.match(rf"(.*\.)?({each})$", module)), None)
    alpha = config.number("lora_alpha", 8.0) if pattern is None else patterns.number(pattern)
    return alpha / (math.sqrt(rank) if config.flag("use_rslora", False) else rank)


def _refuse_other_kinds(config: Fields) -> None:
    body = config.body
    wrong = {
        f"peft_type {body.get('peft_type')}": config.text("peft_type", "LORA").upper() != "LORA",
        "use_dora": bool(body.get("use_dora")),
        "bias": config.text("bias", "none") != "none" or bool(body.get("lora_bias")),
        "modules_to_save": bool(body.get("modules_to_save")),
        "target_parameters": bool(body.get("target_parameters")),
        "trainable_token_indices": bool(body.get("trainable_token_indices")),
        "alora_invocation_tokens": bool(body.get("alora_invocation_tokens")),  # adapts only what follows these tokens
        "layer_replication": bool(body.get("layer_replication")),
        # These change the base weights as well, unless PEFT converted them when it saved.
        f"init_lora_weights {body.get('init_lora_weights')}": str(body.get("init_lora_weights")).split("_")[0]
        in ("pissa", "olora", "corda"),
    }
    for what, is_set in wrong.items():
        if is_set:
            raise ConfigError(
                f"{config.where}: {what} is not supported.",
                hint="Use plain LoRA (matrices A and B of linear modules), or merge the adapter into the model.",
            )


class LoraManager:
    """The loaded adapters by name. They change only between two steps. A change does not affect sequences that use
    other adapters.
    """

    def __init__(self, limit: int) -> None:
        self._by_name: dict[str, Adapter] = {}
        self._ids: dict[str, str] = {}
        self._limit = limit

    def check_free(self, name: str) -> None:
        """Raises ConflictError if `name` is taken. Raises CapacityError if the maximum number of adapters is loaded."""
        if name in self._by_name:
            raise ConflictError(f"adapter {name} is already loaded.", hint="Unload it first, or choose another name.")
        if len(self._by_name) >= self._limit:
            raise CapacityError(
                f"{self._limit} adapters are loaded already.", hint="Unload one, or give the engine more max_loras."
            )

    def add(self, name: str, adapter: Adapter, digest: str) -> None:
        """Adds an adapter. `digest` is the hash of the adapter's files."""
        self.check_free(name)
        self._by_name[name], self._ids[name] = adapter, f"{name}/{digest}"

    def remove(self, name: str) -> Adapter:
        """Removes an adapter that no sequence uses any more, and returns it."""
        self.adapter(name)
        del self._ids[name]
        return self._by_name.pop(name)

    def id_of(self, name: str) -> str:
        """Returns the adapter's id: its name and content hash. Only sequences with the same id share KV. Two adapters
        with the same name but different content have different ids. An id stays the same after a restart.
        """
        self.adapter(name)
        return self._ids[name]

    def group(self, chunks: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """Returns the chunks sorted by adapter, so that rows with the same adapter are neighbours."""
        if not self._by_name:
            return chunks
        return sorted(chunks, key=lambda chunk: chunk.seq.lora or "")

    def rows(self, chunks: list[ScheduledChunk]) -> LoraRows | None:
        """Returns the spans of rows that use an adapter, or None if no chunk uses one. Raises NotFoundError for an
        adapter that is not loaded.
        """
        if all(chunk.seq.lora is None for chunk in chunks):
            return None
        adapters = [
            (None if chunk.seq.lora is None else self.adapter(chunk.seq.lora), chunk.length) for chunk in chunks
        ]
        return LoraRows.of(adapters)

    def adapter(self, name: str) -> Adapter:
        """Returns the adapter of this name. Raises NotFoundError if it is not loaded."""
        if name not in self._by_name:
            raise NotFoundError(f"adapter {name} is not loaded.", hint="Load it first.")
        return self._by_name[name]
