"""Initial weights of a model, loaded from a Hugging Face directory or drawn at random. Each rank loads its own shards.

Random values depend only on the seed and the parameter's name. Every layout therefore starts from the same model, and
no rank holds the whole model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from raytide.actors.trainer.hf.model_source import ModelSource
from raytide.actors.trainer.hf.weight_mapping import Block, HfWeights
from raytide.actors.trainer.model.transformer import Transformer

INIT_STD = 0.02


def load_or_initialise(part: Transformer, origin: ModelSource, seed: int) -> None:
    """Sets all parameters of a rank's part of the model. Loads them from the folder of `origin`, or draws them at
    random if `origin` has no folder. Adapters are never loaded. They are always initialised.
    """
    if origin.folder is None:
        std = origin.config.get("initializer_range", INIT_STD)
        initialise(part, seed, std if isinstance(std, float) else INIT_STD)
        return
    weights = HfWeights(origin.folder, origin.arch)
    for name, parameter in part.named_parameters():
        if "lora_" in name:
            place(parameter, _adapter(name, parameter, seed))
        else:
            _put(parameter, weights.read(name, local_block(parameter)))


def initialise(part: Transformer, seed: int, std: float = INIT_STD) -> None:
    """Draws weights from Normal(0, std). For projections to the residual stream, std is divided by sqrt(2 * layers), as
    in GPT-2. Norms start with a factor of one, and biases with zero.
    """
    for name, parameter in part.named_parameters():
        if parameter.ndim == 1:
            first = 0.0 if name.endswith("bias") else 1.0 - part.arch.norm_offset
            full = torch.full(parameter.shape, first)
        else:
            residual = "o_proj" in name or "down_proj" in name
            width = std / (2 * part.arch.num_layers) ** 0.5 if residual else std
            full = torch.empty(parameter.shape).normal_(0.0, width, generator=_generator(seed, name))
        place(parameter, full)


def place(parameter: Tensor, full: Tensor) -> None:
    """Copies this rank's shard of `full` into a parameter. The copy needs no communication, because every rank has the
    same `full`.
    """
    _put(parameter, full[local_block(parameter)])


def local_block(parameter: Tensor) -> Block:
    """Returns the slices of the full parameter that this rank holds."""
    if not isinstance(parameter, DTensor):
        return cut_block(parameter.shape, ())
    mesh, at = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert at is not None
    dims = [getattr(placement, "dim", None) for placement in parameter.placements]  # replicated: none
    return cut_block(parameter.shape, list(zip(mesh.shape, at, dims, strict=True)))


def cut_block(shape: Sequence[int], axes: Sequence[tuple[int, int, int | None]]) -> Block:
    """Returns the slices of a parameter that are on one rank.

    `axes` describes the axes of the device mesh. Each axis is a tuple: the size of the axis, this rank's index on
    the axis, and the tensor dimension that the axis shards. The dimension is None if the axis does not shard the
    parameter. The innermost axis (tensor parallelism) is cut first, and FSDP cuts the rest.
    """
    block = [slice(0, length) for length in shape]
    for ranks, rank, dim in reversed(axes):
        if dim is not None:
            start, stop = block[dim].start, block[dim].stop
            each = math.ceil((stop - start) / ranks)  # like torch.chunk: the last ranks may have less, or nothing
            start = min(start + rank * each, stop)
            block[dim] = slice(start, min(start + each, stop))
    return tuple(block)


@torch.no_grad()
def _put(parameter: Tensor, local: Tensor) -> None:
    (parameter.to_local() if isinstance(parameter, DTensor) else parameter).copy_(local)


def _adapter(name: str, parameter: Tensor, seed: int) -> Tensor:
    """Returns an adapter's initial weights, as in PEFT: A uniform within 1 / sqrt(inputs), B zero."""
    if "lora_b" in name:
        return torch.zeros(parameter.shape)
    bound = 1 / math.sqrt(parameter.shape[1])
    return torch.empty(parameter.shape).uniform_(-bound, bound, generator=_generator(seed, name))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
