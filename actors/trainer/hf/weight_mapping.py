"""Maps the model's parameters to the tensors of a Hugging Face directory. There is one table for each model family.
Both loading and exporting use the table.

The model has each projection as a separate parameter. Files may stack projections (`qkv_proj`) or transpose them
(GPT-2). They store each expert separately, or all experts in two tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from raytide.actors.models.architecture import Architecture
from raytide.actors.models.loader import Weights
from raytide.actors.models.naming import NAMES, Names, projections
from raytide.core.errors import DataError

Block = tuple[slice, ...]
"""A block of a parameter: a range of each dimension."""

_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """The part of a file's tensor that belongs to one parameter of the model.

    The part consists of `rows` rows and begins at row `start`. If `expert` is set, the parameter stacks all experts,
    and the part holds only that expert.
    """

    parameter: str
    rows: int
    start: int = 0
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in the files of a model. The tensor consists of `slices`, which are stacked along the dimension
    `rows_dim`. `rows_dim` is 1 if the tensor is transposed or holds all experts, else 0.
    """

    name: str
    shape: tuple[int, ...]
    slices: tuple[ParameterSlice, ...]
    transposed: bool = False

    @property
    def rows_dim(self) -> int:
        return 1 if self.transposed or len(self.shape) == 3 else 0


@dataclass(frozen=True, slots=True)
class FamilyFormat:
    """The details in which the files of one model family can differ: the common prefix of the names, the router's name,
    and whether the experts are fused into one tensor.
    """

    root: str
    router: str
    fused_experts: bool = False

    @classmethod
    def on_the_hub(cls, arch: Architecture) -> FamilyFormat:
        """Returns the format that every loader of the family can read. Exports use it."""
        names = NAMES[arch.names]
        return cls(names.root, names.routers[0])

    @classmethod
    def from_names(cls, arch: Architecture, found: Collection[str]) -> FamilyFormat:
        """Returns the format of files whose tensors have the names `found`."""
        names = NAMES[arch.names]
        root = names.root if f"{names.root}{names.embedding}.weight" in found else ""
        router = next((each for each in names.routers if any(f".{each}.weight" in name for name in found)), "")
        fused = any(name.endswith(names.fused_gate_up) for name in found)
        return cls(root, router or names.routers[0], fused)


def file_tensors(arch: Architecture, form: FamilyFormat) -> list[FileTensor]:
    """Returns all tensors of the model's files, in the order in which the model uses them."""
    names, width = NAMES[arch.names], arch.hidden_size
    bias = arch.norm_kind == "layer"
    out = [_same("embedding.weight", f"{form.root}{names.embedding}.weight", arch.vocab_size, width)]
    if arch.learned_positions:
        out.append(_same("positions.weight", f"{form.root}{names.positions}.weight", arch.max_model_len, width))
    for index in range(arch.num_layers):
        param_name, hf_name = f"layers.{index}.", form.root + names.layer.format(index)
        out += _norm(param_name + "input_norm", hf_name + names.input_norm, width, bias)
        out += _attention(arch, index, param_name, hf_name, names)
        if arch.post_norms:
            out += _norm(param_name + "post_attention_norm", hf_name + names.post_attention_norm, width, bias)
        out += _norm(param_name + "ffn_norm", hf_name + names.ffn_norm, width, bias)
        out += _feed_forward(arch, index, param_name + "ffn.", hf_name, form)
        if arch.post_norms:
            out += _norm(param_name + "post_ffn_norm", hf_name + names.post_ffn_norm, width, bias)
    out += _norm("norm", form.root + names.norm, width, bias)
    if not arch.tied_embeddings:
        out.append(_same("head.weight", f"{names.head}.weight", arch.vocab_size, width))
    return out


def to_hf_tensor(tensor: FileTensor, whole: Callable[[str], Tensor]) -> Tensor:
    """Returns a file's tensor, built from the model's full parameters. `whole` returns a full parameter by its name."""
    parts = []
    for piece in tensor.slices:
        block_tensor = whole(piece.parameter)
        block_tensor = block_tensor if piece.expert is None else block_tensor[piece.expert]
        parts.append(block_tensor.t() if tensor.transposed else block_tensor)
    return torch.cat(parts, tensor.rows_dim) if len(parts) > 1 else parts[0]


class HfWeights:
    """Reads the weights of a Hugging Face directory in float32, block by block. Parameters have the model's names."""

    def __init__(self, folder: Path, arch: Architecture) -> None:
        self._weights = Weights(folder, torch.float32, torch.device("cpu"))
        tensors = file_tensors(arch, FamilyFormat.from_names(arch, self._weights.names))
        self._check(folder, arch, tensors)
        self._locations: dict[str, list[tuple[FileTensor, ParameterSlice]]] = {}
        for tensor in tensors:
            for piece in tensor.slices:
                self._locations.setdefault(piece.parameter, []).append((tensor, piece))

    def read(self, param_name: str, block: Block) -> Tensor:
        """Returns a block of a parameter. Reads only the part of the files that contains the block."""
        locations = self._locations[param_name]
        if locations[0][1].expert is None:
            ((tensor, piece),) = locations
            return self._part(tensor, piece, block)
        experts = [self._part(tensor, piece, block[1:]) for tensor, piece in locations[block[0]]]
        return torch.stack(experts) if experts else torch.empty(0, *(size(each) for each in block[1:]))

    def whole(self, param_name: str) -> Tensor:
        """Returns a whole parameter."""
        locations = self._locations[param_name]
        tensor, piece = locations[0]
        shape = list(reversed(tensor.shape)) if tensor.transposed else list(tensor.shape)
        shape[0 if tensor.transposed else tensor.rows_dim] = piece.rows
        if piece.expert is not None:
            shape.insert(0, len(locations))
        return self.read(param_name, tuple(slice(0, each) for each in shape))

    def _part(self, tensor: FileTensor, piece: ParameterSlice, block: Block) -> Tensor:
        where = list(reversed(block)) if tensor.transposed else list(block)
        rows = where[tensor.rows_dim]
        where[tensor.rows_dim] = slice(piece.start + rows.start, piece.start + rows.stop)
        block_tensor = self._weights.part(tensor.name, tuple(where))
        return block_tensor.t() if tensor.transposed else block_tensor

    def _check(self, folder: Path, arch: Architecture, tensors: list[FileTensor]) -> None:
        """Raises DataError with all mismatches at once, on every rank alike."""
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        found = set(self._weights.names)
        wrong = {
            "lacks": [name for name in shapes if name not in found],
            "also has": sorted(name for name in found - shapes.keys() if not _is_idle(name, arch)),
            "has in another shape": [
                f"{name} {self._weights.shape(name)} for {shape}"
                for name, shape in shapes.items()
                if name in found and self._weights.shape(name) != shape
            ],
        }
        mismatches = [f"it {what} {_first_names(each)}" for what, each in wrong.items() if each]
        if mismatches:
            raise DataError(
                f"the weights of {folder} do not match its config.json: {'; '.join(mismatches)}.",
                hint="Export or download the model again. model.config must not change any size.",
            )


def size(part: slice) -> int:
    return int(part.stop - part.start)


def _same(param_name: str, hf_name: str, *shape: int) -> FileTensor:
    return FileTensor(hf_name, shape, (ParameterSlice(param_name, shape[0]),))


def _norm(param_name: str, hf_name: str, width: int, bias: bool) -> list[FileTensor]:
    return [_same(f"{param_name}.{kind}", f"{hf_name}.{kind}", width) for kind in ("weight", "bias")[: 1 + bias]]


def _attention(arch: Architecture, index: int, param_name: str, hf_name: str, names: Names) -> Iterator[FileTensor]:
    q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    qkv = {"attention.q_proj": q, "attention.k_proj": kv, "attention.v_proj": kv}
    yield from _linear(arch, index, "qkv", param_name, hf_name, qkv)
    if arch.head_norms:
        yield from _norm(f"{param_name}attention.q_norm", hf_name + names.query_norm, arch.head_dim, bias=False)
        yield from _norm(f"{param_name}attention.k_norm", hf_name + names.key_norm, arch.head_dim, bias=False)
    yield from _linear(arch, index, "attention_out", param_name, hf_name, {"attention.o_proj": arch.hidden_size})


def _feed_forward(
    arch: Architecture, index: int, param_name: str, hf_name: str, form: FamilyFormat
) -> Iterator[FileTensor]:
    if arch.layers[index].sparse:
        yield from _sparse(arch, param_name, hf_name, form)
        return
    up = {"gate_proj": arch.ffn_size, "up_proj": arch.ffn_size} if arch.gated_ffn else {"up_proj": arch.ffn_size}
    yield from _linear(arch, index, "gate_up", param_name, hf_name, up)
    yield from _linear(arch, index, "down", param_name, hf_name, {"down_proj": arch.hidden_size})


def _linear(
    arch: Architecture, index: int, kind: str, param_name: str, hf_name: str, rows: dict[str, int]
) -> Iterator[FileTensor]:
    """Yields the linear tensors of one kind of projection: a tensor for each projection, or one that stacks all."""
    projection, turned = projections(arch, index)[kind], NAMES[arch.names].transposed
    for suffix in ("weight", "bias") if projection.bias else ("weight",):
        pieces, start = [], 0
        for name, count in rows.items():
            pieces.append(ParameterSlice(f"{param_name}{name}.{suffix}", count, start))
            start += count
        are_separate = len(projection.paths) == len(pieces)
        groups = [(ParameterSlice(each.parameter, each.rows),) for each in pieces] if are_separate else [tuple(pieces)]
        for path, group in zip(projection.paths, groups, strict=True):
            total, inner = sum(each.rows for each in group), projection.columns
            matrix = suffix == "weight"
            shape = ((inner, total) if turned else (total, inner)) if matrix else (total,)
            yield FileTensor(f"{hf_name}{path}.{suffix}", shape, group, turned and matrix)


def _sparse(arch: Architecture, param_name: str, hf_name: str, form: FamilyFormat) -> Iterator[FileTensor]:
    names, experts, width = NAMES[arch.names], arch.experts, arch.hidden_size
    assert experts is not None
    count, ffn = experts.count, experts.ffn_size
    yield _same(f"{param_name}router.weight", f"{hf_name}{form.router}.weight", count, width)
    gate, up, down = (f"{param_name}{each}_proj" for each in ("gate", "up", "down"))
    if form.fused_experts:
        both = (ParameterSlice(gate, ffn), ParameterSlice(up, ffn, ffn))
        yield FileTensor(hf_name + names.fused_gate_up, (count, 2 * ffn, width), both)
        yield FileTensor(hf_name + names.fused_down, (count, width, ffn), (ParameterSlice(down, width),))
        return
    gate_name, up_name = names.expert_gate_up
    for expert in range(count):
        for name, path, rows, columns in (
            (gate, gate_name, ffn, width),
            (up, up_name, ffn, width),
            (down, names.expert_down, width, ffn),
        ):
            piece = ParameterSlice(name, rows, expert=expert)
            yield FileTensor(f"{hf_name}{path.format(expert)}.weight", (rows, columns), (piece,))


def _is_idle(name: str, arch: Architecture) -> bool:
    """Returns whether the tensor is redundant: a table or mask of older files, or a copy of tied embeddings."""
    tied = arch.tied_embeddings and name == f"{NAMES[arch.names].head}.weight"
    return tied or name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"))


def _first_names(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
