"""Computes one step: inputs from the persistent batch, the forward pass over the paged cache, a token for each that
is due.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from pathlib import Path

import torch

from raytide.actors.engine.adapters import Adapters
from raytide.actors.engine.architecture import Architecture
from raytide.actors.engine.batch import PersistentBatch
from raytide.actors.engine.config import EngineConfig
from raytide.actors.engine.loader import Weights
from raytide.actors.engine.logprobs import PromptRows
from raytide.actors.engine.lora import read_adapter
from raytide.actors.engine.model import Decoder
from raytide.actors.engine.pooling import WholePrompts
from raytide.actors.engine.sampler import Sampler
from raytide.actors.engine.sequence import Chunk, Sampled, Sequence, StepPlan
from raytide.core.errors import ConfigError
from raytide.kernels.device import resolve_device
from raytide.kernels.registry import ops_for

__all__ = ["Runner"]


class Runner:
    """Owns the weights, the KV cache and all device memory. The scheduler tells it what to compute and knows nothing
    of it.
    """

    def __init__(self, config: EngineConfig, arch: Architecture) -> None:
        device = resolve_device(config.device)
        dtype = device.dtype(arch.dtype if config.dtype == "auto" else config.dtype)
        self.max_len = _max_len(config, arch)
        self.block_size = config.block_size or device.block_size
        self.num_blocks = config.num_blocks or self._affordable_blocks(config, arch, dtype)
        self.max_len = min(self.max_len, self.num_blocks * self.block_size)
        weights = Weights(Path(config.model_dir), dtype, device.torch_device)
        self._arch, self._ops, self._dtype, self._device = arch, ops_for(device.kind), dtype, device.torch_device
        self._model = Decoder(arch, weights, self._ops, self.max_len)
        self._adapters = Adapters(config.max_loras)
        self._cache = self._model.new_cache(self.num_blocks, self.block_size)
        self.num_host_blocks = int(config.host_memory_gb * 1e9) // _block_bytes(arch, dtype, self.block_size)
        self._host = [self._new_host_cache(kv) for kv in self._cache] if self.num_host_blocks else []
        self._whole = WholePrompts(self._model, self.block_size, device.torch_device)
        self._batch = PersistentBatch(config.max_running, self.max_len, self.block_size, device.torch_device)
        self._sampler = Sampler(arch.vocab_size)

    def execute(self, chunks: list[Chunk]) -> dict[str, Sampled]:
        """Compute the chunks; the next token of each sequence that they bring up to date.

        The log probabilities of prompt tokens go into the sequences that ask for them.

        Executing a chunk again writes the same KV and draws the same token, so a failed step can be retried in parts.
        """
        chunks = self._adapters.group(chunks)
        due = [chunk.seq for chunk in chunks if chunk.samples]
        prompt = PromptRows.of(chunks)
        logits_RV = self.logits(chunks, prompt.rows)
        prompt.record(logits_RV[len(due) :])
        sampled = self._sampler.sample(logits_RV[: len(due)], due)
        return {seq.seq_id: each for seq, each in zip(due, sampled, strict=True)}

    def move(self, plan: StepPlan) -> None:
        """Move blocks between device and host memory as the plan says; before its chunks are executed, and once."""
        for kv, host in zip(self._cache, self._host, strict=False):
            blocks = kv.view(2, self.num_blocks, -1)
            if plan.swap_out:
                sources, targets = zip(*plan.swap_out, strict=True)
                host[:, targets] = blocks[:, sources].to(host.device)
            if plan.swap_in:
                sources, targets = zip(*plan.swap_in, strict=True)
                blocks[:, targets] = host[:, sources].to(blocks.device)
        if plan.copies:
            sources, targets = zip(*plan.copies, strict=True)
            for kv in self._cache:
                blocks = kv.view(2, self.num_blocks, -1)
                blocks[:, targets] = blocks[:, sources]

    def logits(self, chunks: list[Chunk], more_rows: Items[int] = ()) -> torch.Tensor:
        """The forward pass alone: a row of float32 logits for each sequence that is brought up to date, then one for
        each of `more_rows` of the flat batch.
        """
        step = self._batch.build(chunks)
        rows_R = step.sampled_rows_R
        if more_rows:
            rows_R = torch.cat((rows_R, rows_R.new_tensor(more_rows)))
        loras = self._adapters.rows(chunks)
        return self._model.forward(step.ids_T, step.positions_T, step.paged, self._cache, rows_R, loras)

    def prompt_logits(self, tokens: list[int]) -> torch.Tensor:
        """float32 [T, V]: what follows each token of a prompt, computed apart from what runs."""
        return self._whole.logits(tokens)

    def load_lora(self, name: str, path: Path) -> None:
        """Serve sequences whose `lora` is `name` with a PEFT adapter. Raises ConflictError, CapacityError, ConfigError
        or DataError, and then nothing has changed.
        """
        self._adapters.check_free(name)
        self._adapters.add(name, read_adapter(path, self._arch, self._ops, self._dtype, self._device))

    def unload_lora(self, name: str) -> None:
        """Raises NotFoundError. No sequence may use it any more."""
        self._adapters.remove(name)

    def lora_id(self, name: str) -> str:
        """What the KV of an adapter's sequences is known by, for `Sequence.salt`. Raises NotFoundError."""
        return self._adapters.id_of(name)

    def release(self, seq: Sequence) -> None:
        """Forget a sequence that finished or was preempted."""
        self._batch.release(seq)
        self._sampler.forget(seq)

    def scrub(self, blocks: list[int]) -> None:
        """Zero blocks that may hold NaN: padded attention multiplies what it does not use by 0."""
        for kv in self._cache:
            kv.view(2, self.num_blocks, -1)[:, blocks] = 0.0

    def _affordable_blocks(self, config: EngineConfig, arch: Architecture, dtype: torch.dtype) -> int:
        """What kv_memory_gb holds, but no more than max_running sequences can ever use."""
        usable = config.max_running * -(-self.max_len // self.block_size)
        return min(int(config.kv_memory_gb * 1e9) // _block_bytes(arch, dtype, self.block_size), usable)

    def _new_host_cache(self, kv: torch.Tensor) -> torch.Tensor:
        """A layer's host blocks: [2, H, block's elements]; pinned where the device copies from it by itself."""
        elements = kv.numel() // (2 * self.num_blocks)
        return torch.zeros(2, self.num_host_blocks, elements, dtype=kv.dtype, pin_memory=kv.is_cuda)


def _block_bytes(arch: Architecture, dtype: torch.dtype, block_size: int) -> int:
    return arch.kv_elements * dtype.itemsize * block_size


def _max_len(config: EngineConfig, arch: Architecture) -> int:
    if config.max_model_len is None:
        return arch.max_model_len
    if config.max_model_len > arch.max_model_len:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the {arch.max_model_len} positions of the model.",
            hint="Lower it, or leave it out.",
        )
    return config.max_model_len
