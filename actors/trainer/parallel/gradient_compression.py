"""Compresses the gradient exchange between replicas. The methods are bf16, int8, the largest numbers (top-k), and low
rank (PowerSGD).

The exchange runs once per step, on gradients that FSDP has reduced over its own ranks. All methods except bf16 use
error feedback: they keep the error of their approximation and add it to the next step's gradient. Each rank has its own
error. The errors are saved in checkpoints, and start at zero in a new layout.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytide.actors.trainer.distributed import local_shards
from raytide.actors.trainer.optim.muon import is_hidden
from raytide.core.specs.train import MemorySpec

BUCKET = 1 << 24
"""The most elements in one exchange, unless one tensor alone has more."""
BLOCK = 256
"""The number of elements that share one int8 scale."""

Named = Sequence[tuple[str, Tensor]]


class CompressedAllReduce(ABC):
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.sent_bytes = 0
        """Bytes sent by this rank so far."""

    @abstractmethod
    def __call__(self, grads: Named) -> None:
        """Replaces each gradient by its approximate mean over the replicas, equal on all of them."""

    def reset_errors(self) -> None:
        """Sets the error feedback to zero. Call it when a step was not applied, because the errors of that step may not
        be finite.
        """
        for error in self.state_dict().values():
            error.zero_()

    def state_dict(self) -> Mapping[str, Tensor]:
        """Returns the tensors of the error feedback. The mapping is empty if the method has no error feedback. Loading
        a checkpoint fills these tensors in place.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


class Bf16(CompressedAllReduce):
    def __call__(self, grads: Named) -> None:
        for bucket in _buckets(grads):
            flat = torch.cat([grad.flatten() for _, grad in bucket]).div_(self.group.size()).bfloat16()
            self.sent_bytes += _all_reduce(flat, self.group)
            _scatter(flat, bucket)


class Int8(CompressedAllReduce):
    """Averages gradients in int8.

    A bucket is divided among the replicas. Each replica receives its part from all replicas in int8, computes the mean,
    and sends the mean to all replicas in int8.
    """

    def __init__(self, group: dist.ProcessGroup, weights: Named) -> None:
        super().__init__(group)
        self._errors, self._mean_errors = [], []
        for bucket in _buckets(weights):
            count, device = sum(weight.numel() for _, weight in bucket), bucket[0][1].device
            padded = count + -count % (BLOCK * group.size())
            self._errors.append(torch.zeros(padded, device=device))
            self._mean_errors.append(torch.zeros(padded // group.size(), device=device))

    def __call__(self, grads: Named) -> None:
        for index, bucket in enumerate(_buckets(grads)):
            flat = torch.cat([grad.flatten() for _, grad in bucket]).float()
            count = flat.numel()
            flat = torch.nn.functional.pad(flat, (0, -count % (BLOCK * self.group.size())))
            _scatter(self._exchange(flat, self._errors[index], self._mean_errors[index])[:count], bucket)

    def state_dict(self) -> Mapping[str, Tensor]:
        of_mean = {f"mean_error.{index}": error for index, error in enumerate(self._mean_errors)}
        return {f"error.{index}": error for index, error in enumerate(self._errors)} | of_mean

    def _exchange(self, flat: Tensor, error: Tensor, mean_error: Tensor) -> Tensor:
        size = self.group.size()
        flat = flat + error
        codes, scales = _int8(flat)
        error.copy_(flat - _from_int8(codes, scales))
        received, received_scales = torch.empty_like(codes), torch.empty_like(scales)
        dist.all_to_all_single(received, codes, group=self.group)
        dist.all_to_all_single(received_scales, scales, group=self.group)
        mean = _from_int8(received, received_scales).view(size, -1).mean(0) + mean_error
        mean_codes, mean_scales = _int8(mean)
        mean_error.copy_(mean - _from_int8(mean_codes, mean_scales))
        dist.all_gather_into_tensor(codes, mean_codes, group=self.group)
        dist.all_gather_into_tensor(scales, mean_scales, group=self.group)
        self.sent_bytes += 2 * (size - 1) * (_bytes(mean_codes) + _bytes(mean_scales))
        return _from_int8(codes, scales)


class TopK(CompressedAllReduce):
    """Sends only the numbers of largest magnitude and their positions (Aji and Heafield 2017)."""

    def __init__(self, group: dist.ProcessGroup, weights: Named, ratio: float) -> None:
        super().__init__(group)
        self.ratio = ratio
        self._errors = [
            torch.zeros(sum(weight.numel() for _, weight in bucket), device=bucket[0][1].device)
            for bucket in _buckets(weights)
        ]

    def __call__(self, grads: Named) -> None:
        for error, bucket in zip(self._errors, _buckets(grads), strict=True):
            _scatter(self._exchange(torch.cat([grad.flatten() for _, grad in bucket]).float(), error), bucket)

    def state_dict(self) -> Mapping[str, Tensor]:
        return {f"error.{index}": error for index, error in enumerate(self._errors)}

    def _exchange(self, flat: Tensor, error: Tensor) -> Tensor:
        size = self.group.size()
        error += flat
        if not flat.numel():
            return flat
        places = error.abs().topk(math.ceil(self.ratio * flat.numel()), sorted=False).indices
        values, places = error[places], places.int()  # a bucket is far below 2^31
        error[places] = 0
        all_values, all_places = values.new_empty(size * len(values)), places.new_empty(size * len(places))
        dist.all_gather_into_tensor(all_values, values, group=self.group)
        dist.all_gather_into_tensor(all_places, places, group=self.group)
        self.sent_bytes += (size - 1) * (_bytes(values) + _bytes(places))
        mean = torch.zeros_like(flat)
        for of_one, at in zip(all_values.chunk(size), all_places.chunk(size), strict=True):
            mean[at] += of_one / size  # replica after replica: the sums are the same on all of them
        return mean


class PowerSgd(CompressedAllReduce):
    """Sends the gradient of a layer's matrix as the product of two thin matrices (Vogels et al. 2019).

    Small tensors are sent without compression. The embedding and the head are sent without compression too, because
    their gradients have no low rank.
    """

    def __init__(self, group: dist.ProcessGroup, weights: Named, rank: int) -> None:
        super().__init__(group)
        self.rank = rank
        thin = [(name, weight.detach().flatten(1)) for name, weight in weights if self._gains(name, weight)]
        self._errors = {name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in thin}
        self._right = {name: self._start(name, weight) for name, weight in thin}

    def __call__(self, grads: Named) -> None:
        thin = [(name, grad) for name, grad in grads if self._gains(name, grad)]
        plain = [(name, grad) for name, grad in grads if not self._gains(name, grad)]
        for bucket in _buckets(plain):
            self._mean([grad for _, grad in bucket])
        matrices = [grad.float().flatten(1) + self._errors[name] for name, grad in thin]
        lefts = [matrix @ self._right[name] for (name, _), matrix in zip(thin, matrices, strict=True)]
        self._mean(lefts)
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = [matrix.t() @ left for matrix, left in zip(matrices, lefts, strict=True)]
        self._mean(rights)
        for (name, grad), matrix, left, right in zip(thin, matrices, lefts, rights, strict=True):
            close = left @ right.t()
            self._errors[name], self._right[name] = matrix.sub_(close), right
            grad.copy_(close.view_as(grad))

    def reset_errors(self) -> None:
        for name, error in self._errors.items():
            self._right[name] = self._start(name, error.zero_())

    def state_dict(self) -> Mapping[str, Tensor]:
        rights = {f"right.{name}": right for name, right in self._right.items()}
        return {f"error.{name}": error for name, error in self._errors.items()} | rights

    def _gains(self, name: str, grad: Tensor) -> bool:
        if not is_hidden(name, grad) or not grad.numel():
            return False
        rows, columns = grad.shape[0], grad[0].numel()
        return 2 * self.rank * (rows + columns) < rows * columns and min(rows, columns) > self.rank

    def _start(self, name: str, matrix: Tensor) -> Tensor:
        """Returns a random initial right factor, the same on all replicas."""
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
        drawn = torch.randn(matrix.shape[1], self.rank, generator=torch.Generator().manual_seed(seed))
        return drawn.to(matrix.device)

    def _mean(self, tensors: list[Tensor]) -> None:
        if tensors:
            flat = torch.cat([tensor.flatten() for tensor in tensors]).div_(self.group.size())
            self.sent_bytes += _all_reduce(flat, self.group)
            _scatter(flat, [("", tensor) for tensor in tensors])


def create_all_reduce(
    memory: MemorySpec, group: dist.ProcessGroup, parts: Sequence[nn.Module]
) -> CompressedAllReduce | None:
    """Returns the compressed all-reduce over the replicas for the trainable weights in `parts`. Returns None if the
    spec asks for no compression.
    """
    if memory.compression == "none":
        return None
    if memory.compression == "bf16":
        return Bf16(group)
    named = [named for part in parts for named in part.named_parameters()]
    weights = [(name, local_shards.local(weight)) for name, weight in named if weight.requires_grad]
    if memory.compression == "topk":
        return TopK(group, weights, memory.topk_ratio)
    return Int8(group, weights) if memory.compression == "int8" else PowerSgd(group, weights, memory.powersgd_rank)


def _buckets(grads: Named) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields the gradients in order, in buckets of about BUCKET elements."""
    bucket: list[tuple[str, Tensor]] = []
    for named in grads:
        if bucket and sum(grad.numel() for _, grad in bucket) + named[1].numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(named)
    if bucket:
        yield bucket


def _scatter(flat: Tensor, into: Named) -> None:
    start = 0
    for _, tensor in into:
        tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()


def _all_reduce(flat: Tensor, group: dist.ProcessGroup) -> int:
    """Sums in place over all ranks. Returns the bytes that each rank sends in a ring all-reduce."""
    dist.all_reduce(flat, group=group)
    return 2 * (group.size() - 1) * _bytes(flat) // group.size()


def _int8(flat: Tensor) -> tuple[Tensor, Tensor]:
    blocks = flat.view(-1, BLOCK)
    scales = blocks.abs().amax(-1) / 127
    codes = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_().to(torch.int8)
    return codes.flatten(), scales


def _from_int8(codes: Tensor, scales: Tensor) -> Tensor:
    return (codes.view(-1, BLOCK) * scales[:, None]).flatten()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
