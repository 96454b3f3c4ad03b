"""Computes a step: builds its inputs from the persistent batch, runs the forward pass over the paged cache, and samples
tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from raytide.actors.engine.config import EngineConfig
from raytide.actors.engine.kv_cache.kv_cache import KvCache
from raytide.actors.engine.model.decoder import PagedDecoder, prompt_logits
from raytide.actors.engine.model.draft_model import DraftModel, check_same_vocabulary
from raytide.actors.engine.model.input_batch import InputBatch
from raytide.actors.engine.model.lora import LoraManager, adapter_digest, read_adapter
from raytide.actors.engine.model.pooling import PooledRows
from raytide.actors.engine.model.weight_loader import QuantizedOptions
from raytide.actors.engine.sampling.logprobs import PromptRows
from raytide.actors.engine.sampling.sampler import Sampler
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.scheduler.preemption import SwapCost
from raytide.actors.engine.sequence import Sampled, ScheduledChunk, Sequence, StepPlan
from raytide.actors.engine.types import as_request_error
from raytide.actors.models.architecture import Architecture, model_shape
from raytide.actors.models.families import read_architecture
from raytide.actors.models.quantized.gguf.packaged_models import packaged_path
from raytide.actors.models.quantized.model_weights import open_weights
from raytide.core.errors import ConfigError, EngineDeadError, EngineError
from raytide.kernels.core import LinearInput
from raytide.kernels.device import resolve_device
from raytide.kernels.ref import SCALE_BYTES
from raytide.kernels.registry import Ops, ops_for

if TYPE_CHECKING:
    from raytide.actors.engine.model.parallel.launcher import LocalMembers
    from raytide.actors.engine.model.parallel.leader import GroupLeader

_MEASURED_TOKENS = 256
_C_OPERATORS = "raytide.kernels.quantized"
_INT8_PARAMETERS = 1_000_000_000
"""The number of weights from which int8 inputs are the default. They cost a model of 135 million weights right answers,
and published losses shrink with size."""
_ROW_COST, _ROW_COST_GPU = 0.25, 0.02


class ModelRunner:
    """Runs the model's steps.

    It owns the weights, the KV cache and all device memory. The scheduler knows nothing about these."""

    def __init__(self, config: EngineConfig, arch: Architecture, launcher: LocalMembers | None = None) -> None:
        """Loads the model. `launcher` starts the other members of a group of processes; None starts them on this
        machine."""
        self.arch, self._device = arch, resolve_device(config.device)
        self._dtype = self._device.dtype(arch.dtype if config.dtype == "auto" else config.dtype)
        self.max_len = _max_len(config, arch)
        self.block_size = config.block_size or self._device.block_size
        self.batch_tokens = config.max_batch_tokens or max(self._device.batch_tokens, config.max_running)
        self.rounds_kv = config.kv_dtype == "int8"
        block_bytes = self._kv_bytes(_own_kv_elements(config, arch), arch.head_dim)
        draft = None if config.draft_model is None else read_architecture(_directory(config.draft_model))
        draft_bytes = 0 if draft is None else self._kv_bytes(draft.kv_elements, draft.head_dim)
        # What kv_memory_gb holds, but no more than max_running sequences can ever use.
        usable = config.max_running * -(-self.max_len // self.block_size)
        num_blocks = config.num_blocks or min(int(config.kv_memory_gb * 1e9) // (block_bytes + draft_bytes), usable)
        self.max_len = min(self.max_len, num_blocks * self.block_size)
        num_host_blocks = int(config.host_memory_gb * 1e9) // block_bytes
        self._ops = ops_for(self._device.kind, config.deterministic)
        self._quantized = QuantizedOptions(
            _quantized_input(config, arch, self._ops), config.quantized_head, self.rounds_kv
        )
        self._leader = None if config.num_processes == 1 else self._form_group(config, launcher)
        if self._leader is None:
            self.cache = KvCache(num_blocks, num_host_blocks)
        else:
            self.cache = self._leader.new_cache(num_blocks, num_host_blocks, self.block_size)
        self._weights_bytes = None if config.weights_memory_gb is None else int(config.weights_memory_gb * 1e9)
        self._adapters = LoraManager(config.max_loras)
        self._model: PagedDecoder | None = None
        try:
            self.use(self.load(_directory(config.model_dir)))
            self.draft_model = None if draft is None else self._load_draft(config, draft)
            self.allocate()
        except BaseException:
            self.close()
            raise
        self._batch = InputBatch(config.max_running, self.max_len, self.block_size, self._device.torch_device)
        self._sampler = Sampler()

    def _kv_bytes(self, elements: int, head_dim: int) -> int:
        """Returns the bytes of a block whose tokens have `elements` KV elements each, in heads of `head_dim`."""
        each = elements // head_dim * (head_dim + SCALE_BYTES) if self.rounds_kv else elements * self._dtype.itemsize
        return each * self.block_size

    def _form_group(self, config: EngineConfig, launcher: LocalMembers | None) -> GroupLeader:
        """Starts the other processes that share the model, and returns their leader."""
        from raytide.actors.engine.model.parallel.decoder import Computation
        from raytide.actors.engine.model.parallel.launcher import LocalMembers
        from raytide.actors.engine.model.parallel.leader import GroupLeader

        size, threads = config.num_processes, torch.get_num_threads()
        if launcher is None:
            share = max(1, threads // size) if self._device.kind == "cpu" else threads
            launcher = LocalMembers(range(1, size), local_size=size, threads=share)
        computation = Computation(
            self.arch,
            self._ops,
            self._device.torch_device,
            self._dtype,
            self.max_len,
            config.deterministic,
            self._quantized,
        )
        return GroupLeader(computation, size, launcher, stages=config.pipeline_parallel)

    def _load_draft(self, config: EngineConfig, arch: Architecture) -> DraftModel:
        """Returns the draft model. Raises ConfigError if its vocabulary differs or its context is too short."""
        assert config.draft_model is not None
        model_dir = _directory(config.draft_model)
        check_same_vocabulary(self.arch, _directory(config.model_dir), arch, model_dir)
        if arch.max_model_len < self.max_len:
            raise ConfigError(
                f"draft_model {model_dir} has {arch.max_model_len} positions, the engine's sequences {self.max_len}.",
                hint=f"Set max_model_len to {arch.max_model_len} at most, or take another draft model.",
            )

        def load() -> PagedDecoder:
            weights = open_weights(model_dir, self._dtype, self._device.torch_device)
            return PagedDecoder(arch, weights, self._ops, self.max_len, self._quantized)

        return DraftModel(
            load,
            max_len=self.max_len,
            max_running=config.max_running,
            num_blocks=self.cache.num_blocks,
            block_size=self.block_size,
            device=self._device.torch_device,
            row_cost=self.row_cost,
        )

    def load(self, model_dir: Path) -> PagedDecoder:
        """Reads other weights and returns them. The present weights stay loaded and in use."""
        if self._leader is not None:
            return self._leader.load(model_dir)
        limit = self._weights_bytes
        weights = open_weights(model_dir, self._dtype, self._device.torch_device, maps=limit is None)
        return PagedDecoder(self.arch, weights, self._ops, self.max_len, self._quantized, limit)

    def use(self, model: PagedDecoder) -> None:
        """Computes with these weights from now on. KV of the former weights becomes invalid."""
        if self._leader is not None:
            self._leader.use(model)
        self._model = model

    @property
    def death(self) -> EngineDeadError | None:
        """The error of an engine that ended because another member process ended. None while the engine lives."""
        return None if self._leader is None else self._leader.death

    def close(self) -> None:
        """Ends the other member processes of the model. Idempotent."""
        if self._leader is not None:
            self._leader.close()

    @property
    def dtype_name(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    @property
    def kv_dtype_name(self) -> str:
        return f"{self.dtype_name} rounded to int8" if self.rounds_kv else self.dtype_name

    @property
    def quantization(self) -> str:
        """The formats of the quantized weights and of their inputs. Empty for a model without quantized weights."""
        return self._loaded.quantization

    @property
    def streamed_layers(self) -> int:
        """The number of layers that are read from the files in every step."""
        return self._loaded.streamed_layers

    @property
    def row_cost(self) -> float:
        """A first guess of the time that one more row adds to a step, relative to a step with one row. It depends on
        the device type."""
        return _ROW_COST if self._device.kind == "cpu" else _ROW_COST_GPU

    @property
    def has_weights(self) -> bool:
        return self._model is not None

    def allocate(self) -> None:
        """Allocates the KV memory of the model, and of the draft model if there is one."""
        self.cache.allocate(self._loaded.new_cache(self.cache.num_blocks, self.block_size))
        if self.draft_model is not None:
            self.draft_model.allocate()

    def sleep(self, level: Literal[1, 2]) -> None:
        """Frees the KV memory. At level 2, frees the weights as well."""
        self.cache.free()
        if self.draft_model is not None:
            self.draft_model.free(weights=level == 2)
        if level == 2:
            self._model = None
            if self._leader is not None:
                self._leader.free_weights()
        if self._device.torch_device.type == "cuda":
            torch.cuda.empty_cache()

    def swap_cost(self) -> SwapCost | None:
        """Measures the cost of swapping a block. Call it while no step runs. Returns None if there is no host memory
        for swapped blocks.
        """
        if not self.cache.num_host_blocks:
            return None
        count = min(_MEASURED_TOKENS // self.block_size + 1, self.cache.num_host_blocks, self.cache.num_blocks)
        pairs = [(block, block) for block in range(count)]
        move_s = _best_s(lambda: self.cache.move(StepPlan(swap_out=pairs, swap_in=pairs)))
        return SwapCost(move_s / count / self.prefill_token_s)

    @cached_property
    def prefill_token_s(self) -> float:
        """The time in seconds to compute one prompt token, measured at first use, while no step runs."""
        length = min(_MEASURED_TOKENS, self.max_len - 1)
        prompt = Sequence("measured", [0] * length, length, SamplingParams(), self.max_len, frozenset(), 0)
        prompt.block_ids += range(-(-length // self.block_size))
        prefill_s = _best_s(lambda: self.logits([ScheduledChunk(prompt, 0, length)]).cpu())
        self.release(prompt)
        return prefill_s / length

    @property
    def operators(self) -> list[str]:
        """The qualified names of the operator implementations in use."""
        used = [getattr(self._ops, field.name) for field in fields(self._ops)]
        return [f"{each.__module__}.{each.__qualname__}" for each in used]

    def execute_isolating_failures(
        self, chunks: list[ScheduledChunk]
    ) -> tuple[dict[str, list[Sampled]], dict[str, Exception]]:
        """Computes the chunks and returns the results and the errors, both by sequence id. After a failure it splits
        the chunks into halves, until a batch fits in memory or the sequence at fault is found.

        The sequence at fault is tried once more without its draft, if it has one.
        """
        if not chunks:
            return {}, {}
        try:
            return self.execute(chunks), {}
        except EngineDeadError:
            raise
        except BaseException as error:
            fault = as_request_error(error)
            if len(chunks) == 1 and not chunks[0].draft:
                return {}, {chunks[0].seq.seq_id: fault}
            del fault
        # Outside of the handler, whose traceback would keep the failed step's tensors alive.
        if len(chunks) == 1:
            chunks[0].add_draft(())
            return self.execute_isolating_failures(chunks)
        half = len(chunks) // 2
        parts = [self.execute_isolating_failures(chunks[:half]), self.execute_isolating_failures(chunks[half:])]
        return parts[0][0] | parts[1][0], parts[0][1] | parts[1][1]

    def execute(self, chunks: list[ScheduledChunk]) -> dict[str, list[Sampled]]:
        """Computes the chunks. Then samples a next token for each sequence that has no uncomputed tokens left. If the
        beginning of a sequence's draft is right, the sequence gets several tokens. Returns the new tokens by sequence
        id.

        Records prompt log probabilities and pooled states in the sequences. Executing a chunk twice writes the same
        KV and draws the same token, so a failed step can be retried in parts.
        """
        chunks = self._adapters.group(chunks)
        due = [chunk for chunk in chunks if chunk.yields_token]
        num_rows = sum(1 + len(chunk.draft) for chunk in due)
        prompt = PromptRows.of(chunks)
        logits_RV = self.logits(chunks, prompt.rows)
        if prompt.rows:
            prompt.record(logits_RV[num_rows:])
            logits_RV = logits_RV[:num_rows]
        runs = self._sampler.sample_runs(logits_RV, due)
        return {chunk.seq.seq_id: run for chunk, run in zip(due, runs, strict=True)}

    def logits(self, chunks: list[ScheduledChunk], more_rows: Items[int] = ()) -> torch.Tensor:
        """Runs the forward pass and returns float32 logits. Each sequence that gets a next token has one row of logits,
        and one more row for each draft token. After these rows come the logits of the rows `more_rows` of the flat
        batch. Also records the pooled states.
        """
        step, pooled = self._batch.build(chunks), PooledRows.of(chunks)
        if more_rows or pooled.rows:
            step.rows_R = torch.cat((step.rows_R, step.rows_R.new_tensor([*more_rows, *pooled.rows])))
        step.images = None if self._loaded.vision is None else self._loaded.vision.rows(chunks)
        step.loras = self._adapters.rows(chunks)
        if not pooled.rows:
            return self._loaded.forward(step, self.cache.layers)
        hidden_RN, head = self._loaded.hidden(step, self.cache.layers), self._loaded.head
        num_logits = len(step.rows_R) - len(pooled.rows)
        pooled.record(hidden_RN[num_logits:], head)
        return head(hidden_RN[:num_logits])

    def prompt_logits(self, tokens: list[int]) -> torch.Tensor:
        """Returns float32 logits [T, V] after each token of a prompt, computed separately from running sequences."""
        return prompt_logits(self._loaded, tokens, self.block_size, self._device.torch_device)

    def load_lora(self, name: str, path: Path) -> None:
        """Loads a PEFT adapter, which sequences use if their `lora` is `name`. Raises ConflictError, CapacityError,
        ConfigError or DataError. After an error nothing has changed.
        """
        self._adapters.check_free(name)
        if self._leader is not None:
            adapter = self._leader.load_adapter(path)
        else:
            adapter = read_adapter(path, self.arch, self._ops, self._dtype, self._device.torch_device)
        self._adapters.add(name, adapter, adapter_digest(path))

    def unload_lora(self, name: str) -> None:
        """Removes an adapter that no sequence uses any more. Raises NotFoundError for an unknown adapter."""
        adapter = self._adapters.remove(name)
        if self._leader is not None:
            self._leader.drop_adapter(adapter)

    def lora_id(self, name: str) -> str:
        """Returns the adapter's id for `Sequence.salt`. Raises NotFoundError for an unknown adapter."""
        return self._adapters.id_of(name)

    def allowed(self, seq: Sequence, draft: list[int]) -> int:
        """Returns how many draft tokens, counted from the start of the draft, the sequence's grammar allows. Without a
        grammar, all tokens are allowed.
        """
        return len(draft) if seq.grammar is None else self._sampler.allowed(seq, draft)

    def release(self, seq: Sequence) -> None:
        """Frees the batch row, draft state and sampling state of a sequence that finished or was preempted."""
        self._batch.release(seq)
        if self.draft_model is not None:
            self.draft_model.release(seq)
        self._sampler.forget(seq)

    @property
    def _loaded(self) -> PagedDecoder:
        if self._model is None:
            raise EngineError("the engine sleeps without its weights.", hint="Wake it.")
        return self._model


def _best_s(work: Callable[[], object]) -> float:
    """Returns the shortest of three run times of `work` in seconds, after a warm-up."""
    times = []
    for _ in range(4):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _own_kv_elements(config: EngineConfig, arch: Architecture) -> int:
    """Returns the KV elements per token of the member that holds the most. Raises ConfigError for a model that the
    members cannot share.
    """
    if config.num_processes == 1:
        return arch.kv_elements
    from raytide.actors.engine.model.parallel.shard import ModelShard

    shards = ModelShard.of_group(config.pipeline_parallel, config.tensor_parallel)
    own = shards[0].architecture(arch)
    return own.kv_elements // own.num_layers * max(len(shard.layers(arch)) for shard in shards)


def _directory(model: str) -> Path:
    """Returns the path of a model, which is given by its path or by the name of a packaged model."""
    return Path(packaged_path(model) or model)


def _quantized_input(config: EngineConfig, arch: Architecture, ops: Ops) -> LinearInput:
    """Returns the input type of quantized linears. "auto" chooses int8 only where it is known to be faster, which is
    with the C operators, and only for models that are large enough not to lose accuracy by it.
    """
    if config.quantized_input != "auto":
        return config.quantized_input
    gains = ops.quantized_linear.__module__ == _C_OPERATORS
    return "int8" if gains and model_shape(arch).parameters >= _INT8_PARAMETERS else "float"


def _max_len(config: EngineConfig, arch: Architecture) -> int:
    if config.max_model_len is None:
        return arch.max_model_len
    if config.max_model_len > arch.max_model_len:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the {arch.max_model_len} positions of the model.",
            hint="Lower it, or leave it out.",
        )
    return config.max_model_len
