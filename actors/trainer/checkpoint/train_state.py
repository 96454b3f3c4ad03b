"""The training state as named tensor shards, independent of the layout. Checkpoints and snapshots use this form.

Names contain nothing of the layout: `model.layers.3.q_proj.weight`, `optim.layers.3.q_proj.weight.exp_avg`. A shard has
its offsets in the whole tensor. Any layout can therefore read what any other layout wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Prefixes that torch.compile and activation checkpointing put into names."""


@dataclass(frozen=True, slots=True)
class TensorShard:
    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """Offsets of `local` in the whole tensor."""
    local: Tensor
    optional: bool = False
    """True if a tensor that is missing in a checkpoint keeps its value."""


class OptimizerState(Protocol):
    def tensors(self) -> Mapping[str, Tensor]:
        """Returns the state's tensors under the names `<parameter>.<key>`. A tensor is a DTensor if its parameter is a
        DTensor. The tensors exist before the first step.
        """

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Sets the optimizer's state. `tensors` must be a result of the method `tensors`. The caller has written the
        values to load into these tensors.
        """


class Stateful(Protocol):
    """An object with training state other than weights, such as a loss scale. The tensors of the state have fixed
    shapes. Each tensor has the same value on all ranks, unless its name contains the rank.
    """

    def state_dict(self) -> Mapping[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


class TrainState:
    """The state of a model, an optimizer and other stateful objects. Create it before the first step, because FSDP may
    later replace the model's parameters with other tensors.
    """

    def __init__(
        self, parts: Sequence[nn.Module], optimizer: OptimizerState, extras: Mapping[str, Stateful] | None = None
    ) -> None:
        self.optimizer, self.extras = optimizer, {} if extras is None else extras
        self._model = [(f"model.{name}", tensor) for part in parts for name, tensor in _saved_tensors(part)]
        self._offsets: dict[str, tuple[int, ...]] = {}

    def shards(self) -> list[TensorShard]:
        """Returns this rank's shards of all tensors, without a copy. A shard may be empty. Tensors of other pipeline
        stages are left out.
        """
        return self._shards(self.optimizer.tensors(), self._extras())

    def load(self, fill: Callable[[list[TensorShard]], None]) -> None:
        """Loads the state. `fill` is called with this rank's shards and must write all values in place."""
        moments = self.optimizer.tensors()
        extras = self._extras()
        fill(self._shards(moments, extras))
        self.optimizer.load(moments)
        for name, extra in self.extras.items():
            extra.load_state_dict(extras[name])

    def _extras(self) -> dict[str, Mapping[str, Tensor]]:
        return {name: extra.state_dict() for name, extra in self.extras.items()}

    def _shards(self, moments: Mapping[str, Tensor], extras: Mapping[str, Mapping[str, Tensor]]) -> list[TensorShard]:
        tensors = [*self._model, *((f"optim.{name}", tensor) for name, tensor in moments.items())]
        found = [self._shard(name, tensor) for name, tensor in tensors]
        for name, tensors_of in extras.items():
            for key, tensor in tensors_of.items():
                offsets = (0,) * tensor.ndim
                found.append(TensorShard(f"extra.{name}.{key}", tuple(tensor.shape), offsets, tensor, optional=True))
        return found

    @torch.no_grad()  # with autograd, to_local takes half the time of a copy
    def _shard(self, name: str, tensor: Tensor) -> TensorShard:
        if not isinstance(tensor, DTensor):
            return TensorShard(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor.detach())
        if name not in self._offsets:  # constant for a layout, and slow to compute
            self._offsets[name] = tuple(tensor.__create_chunk_list__()[0].offsets)
        return TensorShard(name, tuple(tensor.shape), self._offsets[name], tensor.to_local().detach())


def _saved_tensors(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that training changes, tied weights once. Frozen weights are not saved: they are loaded with
    the initial model.
    """
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
