"""All that a step changes, as named pieces of tensors: what a checkpoint and a snapshot hold, whatever the layout.

Names are those of the model alone: `model.layers.3.q_proj.weight`, `optim.layers.3.q_proj.weight.exp_avg`. A piece is
the part of a tensor that this rank has, with its place in the whole, so that any layout reads what any other wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing put into names."""


@dataclass(frozen=True, slots=True)
class TensorShard:
    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    """Where `local` begins in it."""
    local: Tensor
    optional: bool = False
    """It keeps its value where a checkpoint does not have it."""


class OptimizerState(Protocol):
    def tensors(self) -> Mapping[str, Tensor]:
        """By `<parameter>.<key>`; DTensors where the parameter is one. They exist before the first step."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what was written into the tensors that `tensors` gave."""
        ...


class Stateful(Protocol):
    """State beside the weights (a loss scale, a guard's window): tensors of fixed shapes, equal on all ranks or under a
    name of each rank's own."""

    def state_dict(self) -> Mapping[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


class TrainState:
    """Built before the first step: FSDP may show other tensors under the same names once the model has run."""

    def __init__(
        self, parts: Sequence[nn.Module], optimizer: OptimizerState, extras: Mapping[str, Stateful] | None = None
    ) -> None:
        self.optimizer, self.extras = optimizer, {} if extras is None else extras
        self._model = [(f"model.{name}", tensor) for part in parts for name, tensor in _saved_tensors(part)]
        self._places: dict[str, tuple[int, ...]] = {}

    def shards(self) -> list[TensorShard]:
        """Of every tensor that this rank has a part of, with the live values."""
        return self._pieces(self.optimizer.tensors(), self._extras())

    def load(self, fill: Callable[[list[TensorShard]], None]) -> None:
        """Have `fill` write every piece in place."""
        moments = self.optimizer.tensors()
        extras = self._extras()
        fill(self._pieces(moments, extras))
        self.optimizer.load(moments)
        for name, extra in self.extras.items():
            extra.load_state_dict(extras[name])

    def _extras(self) -> dict[str, Mapping[str, Tensor]]:
        return {name: extra.state_dict() for name, extra in self.extras.items()}

    def _pieces(self, moments: Mapping[str, Tensor], extras: Mapping[str, Mapping[str, Tensor]]) -> list[TensorShard]:
        tensors = [*self._model, *((f"optim.{name}", tensor) for name, tensor in moments.items())]
        found = [self._piece(name, tensor) for name, tensor in tensors]
        for name, tensors_of in extras.items():
            for key, tensor in tensors_of.items():
                place = (0,) * tensor.ndim
                found.append(TensorShard(f"extra.{name}.{key}", tuple(tensor.shape), place, tensor, optional=True))
        return found

    @torch.no_grad()  # with gradients on, to_local is an operation of its own: half of what a copy takes
    def _piece(self, name: str, tensor: Tensor) -> TensorShard:
        if not isinstance(tensor, DTensor):
            return TensorShard(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor.detach())
        if name not in self._places:  # the same for as long as the layout, and slow to find
            self._places[name] = tuple(tensor.__create_chunk_list__()[0].offsets)
        return TensorShard(name, tuple(tensor.shape), self._places[name], tensor.to_local().detach())


def _saved_tensors(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What training changes; frozen weights come from where they came first. Tied weights go by their first name."""
    seen: set[int] = set()
    for prefix, module in part.named_modules():
        buffers = [
            (k, v) for k, v in module.named_buffers(recurse=False) if k not in module._non_persistent_buffers_set
        ]
        trained = [(k, v) for k, v in module.named_parameters(recurse=False) if v.requires_grad]
        for key, tensor in [*trained, *buffers]:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield _without_wrappers(f"{prefix}.{key}" if prefix else key), tensor


def _without_wrappers(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
