"""The ranks of the layout tests: one layout after another in the same processes, some with a part broken."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import MagicMock, PropertyMock, patch

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor import DTensor

from raytide.actors.trainer.distributed import process_group
from raytide.actors.trainer.distributed.collectives import local
from raytide.actors.trainer.model import attention
from raytide.actors.trainer.parallel import (
    forward_backward,
    parallelize,
    pipeline_parallel,
    tensor_parallel,
)
from raytide.actors.trainer.trainer import Trainer
from raytide.core.specs.parallelism import Parallelism
from raytide.core.specs.train import TrainSpec

Weights = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Case:
    spec: TrainSpec
    broken: str = ""
    """The one of BREAKS that is done to it."""


@dataclass
class Curve:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: Weights = field(default_factory=dict)
    """After the last step, whole: those that this rank has a part of."""


def curves(cases: Sequence[Case], rank: int, world: int, meet: str) -> list[Curve]:
    gc.freeze()  # what torch's import made; to look through it after each case would cost as much as some cases
    return [curve(case, rank, world, f"{meet}-{index}") for index, case in enumerate(cases)]


def curve(case: Case, rank: int, world: int, meet: str) -> Curve:
    sizes = case.spec.layout.sizes(world)
    if rank >= sizes.world:
        return Curve()
    mine = process_group.join(dist.FileStore(meet, sizes.world), rank, sizes, timeout_s=30.0)
    out = Curve()
    with BREAKS[case.broken]():
        trainer = Trainer(case.spec, mine)
        for _ in range(case.spec.steps):
            result = trainer.step()
            assert result is not None
            out.losses.append(result.loss)
            out.norms.append(result.grad_norm)
    for part in trainer.model_parts:
        for name, weight in part.named_parameters():
            out.weights[name] = whole(weight).numpy()
    trainer.close()
    del trainer
    gc.collect()
    process_group.leave()
    return out


def whole(weight: Tensor) -> Tensor:
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().clone()


def _frees_weights_under_a_split_backward() -> AbstractContextManager[Any]:
    return patch.object(Parallelism, "frees_after_forward", new_callable=PropertyMock, return_value=True)


@contextmanager
def _torch_scales_the_gradients() -> Iterator[None]:
    """Lets a schedule scale the gradients, as it does unless it is told otherwise."""
    whole_init = PipelineScheduleSingle.__init__

    def init(self: Any, *args: Any, **named: Any) -> None:
        whole_init(self, *args, **{**named, "scale_grads": True})

    with patch.object(PipelineScheduleSingle, "__init__", init):
        yield


def _mask_from_the_first_key(q_BHTC: Tensor, k_BKTC: Tensor, window: int | None, documents_BS: Tensor | None) -> Tensor:
    """Returns the mask that `is_causal` means to torch when there are more keys than queries."""
    return torch.ones(q_BHTC.shape[2], k_BKTC.shape[2], dtype=torch.bool).tril()


@contextmanager
def _legacy_replicate() -> Iterator[None]:
    """Torch's `replicate` in FSDP's place. It takes DTensors for their local parts and knows of no tensor axis: nobody
    completes the gradients of what that axis has replicated. Our own check of it is off here."""
    from torch.distributed._composable.replicate import replicate

    def shard(part: Any, spec: TrainSpec, mine: process_group.ProcessGroup) -> None:
        replicate(part, process_group=mine.mesh["replicate"].get_group())

    def unchecked(weight: Tensor) -> Tensor:
        return local(weight) if isinstance(weight, DTensor) else weight

    with (
        patch.object(parallelize, "shard", shard),
        patch.object(forward_backward, "cast", lambda *_: MagicMock()),
        patch.object(tensor_parallel, "local", unchecked),
    ):
        yield


BREAKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "copies by torch's replicate": _legacy_replicate,
    "weights freed under a split backward": _frees_weights_under_a_split_backward,
    "gradients scaled by torch": _torch_scales_the_gradients,
    "tied copies apart": lambda: patch.object(pipeline_parallel.TiedEmbeddingSync, "add_up", lambda self: None),
    "mean for a sum": lambda: patch.object(
        process_group.ProcessGroup, "gradient_divisor", new_callable=PropertyMock, return_value=1
    ),
    "mask not offset": lambda: patch.object(attention, "causal_mask", _mask_from_the_first_key),
    "last microbatch not reduced": lambda: patch.object(forward_backward, "cast", lambda _, part: _NeverReduces(part)),
}


class _NeverReduces:
    """An FSDP module whose gradients stay on their rank."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def set_requires_gradient_sync(self, wanted: bool) -> None:
        self._part.set_requires_gradient_sync(False)
