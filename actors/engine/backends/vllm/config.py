"""Translates the options of the vLLM backend into vLLM's engine arguments and environment. Does not import vLLM."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import Field, model_validator

from raytide.actors.engine.config import EngineConfig
from raytide.core.errors import ConfigError

_NOT_IN_VLLM = (
    *("ageing_s", "deterministic", "host_memory_gb", "kv_dtype", "local_disk", "max_local_disk_size"),
    "team_slowdown",
)

_BATCH_TOKENS = 2048

DATA_ONLY = frozenset(
    {
        *("block_size", "calculate_kv_scales", "cpu_offload_gb", "cudagraph_capture_sizes", "data_parallel_size"),
        *("decode_context_parallel_size", "disable_cascade_attn", "disable_custom_all_reduce", "disable_log_stats"),
        *("disable_sliding_window", "dtype", "enable_chunked_prefill", "enable_eplb", "enable_expert_parallel"),
        *("enable_lora", "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization", "kv_cache_dtype"),
        *("kv_cache_memory_bytes", "limit_mm_per_prompt", "long_prefill_token_threshold", "max_cpu_loras"),
        *("max_cudagraph_capture_size", "max_logprobs", "max_long_partial_prefills", "max_lora_rank", "max_loras"),
        *("max_model_len", "max_num_batched_tokens", "max_num_partial_prefills", "max_num_seqs"),
        *("max_parallel_loading_workers", "mm_processor_cache_gb", "num_gpu_blocks_override"),
        *("pipeline_parallel_size", "quantization", "scheduling_policy", "seed", "skip_mm_profiling"),
        *("stream_interval", "swap_space", "tensor_parallel_size", "async_scheduling", "fully_sharded_loras"),
        *("kv_offloading_size", "language_model_only", "optimization_level", "performance_mode"),
    }
)
"""vLLM's arguments that are numbers, switches and words. Others may name code, such as `trust_remote_code`, the code in
the model's directory, and `worker_cls`, a class.
"""

# Arguments that some versions of vLLM lack and do not need.
_OPTIONAL = frozenset({"distributed_executor_backend", "generation_config", "worker_extension_cls"})


@dataclass(frozen=True, slots=True)
class Span:
    """One of the `size` nodes that run one engine together. This node has the number `rank` and the address `own_host`.
    Node 0 listens at `host` and `port`. All nodes use `seed` if the engine's options have no seed.
    """

    size: int
    rank: int
    host: str
    port: int
    own_host: str
    seed: int

    def arguments(self) -> dict[str, Any]:
        """Returns the engine arguments that let vLLM's processes on all nodes find each other without Ray."""
        return {
            "nnodes": self.size,
            "node_rank": self.rank,
            "master_addr": self.host,
            "master_port": self.port,
            "distributed_executor_backend": "mp",
        }


class VllmConfig(EngineConfig):
    """The options of an engine that uses vLLM: the fields of `EngineConfig` that vLLM supports, and vLLM's own
    arguments under `vllm`.
    """

    max_loras: int = Field(default=0, ge=0, description="adapters loaded at once; any makes vLLM's layers slower")
    max_lora_rank: int = Field(default=16, ge=1)
    vllm: dict[str, Any] = Field(default_factory=dict, description="fields of vLLM's AsyncEngineArgs; they win")

    @model_validator(mode="after")
    def _is_in_vllm(self) -> VllmConfig:
        defaults = type(self).model_fields
        for name in _NOT_IN_VLLM:
            if getattr(self, name) != defaults[name].default:
                raise ValueError(f"{name} is an option of the native engine; vLLM has none like it")
        if self.policy == "deadline":
            raise ValueError("policy is fcfs or priority with vLLM, which knows no deadlines")
        return self


def code_options(engine: Mapping[str, object]) -> list[str]:
    """Returns those of vLLM's arguments in an endpoint's engine options with which vLLM may run code of the endpoint's
    owner. Arguments that are null or false do not count.
    """
    own = engine.get("vllm")
    given = own if isinstance(own, dict) else {}
    return sorted(name for name, value in given.items() if name not in DATA_ONLY and value not in (None, False))


def engine_arguments(
    config: VllmConfig, known: Collection[str], is_cpu: bool, span: Span | None = None
) -> dict[str, Any]:
    """Returns the arguments for vLLM's AsyncEngineArgs. `known` are the parameters of the installed AsyncEngineArgs.
    `span` describes this node if several nodes compute the model.

    Raises ConfigError if `known` lacks an argument that the user's options set, or one that raytide needs.
    """
    unknown = sorted(config.vllm.keys() - set(known))
    if unknown:
        raise ConfigError(f"vLLM has no engine argument {', '.join(unknown)}.", hint="See vLLM's AsyncEngineArgs.")
    arguments: dict[str, Any] = {
        "model": config.model_dir,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_running,
        "max_num_batched_tokens": config.max_batch_tokens or _BATCH_TOKENS,
        "block_size": config.block_size,
        "num_gpu_blocks_override": config.num_blocks,
        "kv_cache_memory_bytes": int(config.kv_memory_gb * 1e9),
        "enable_prefix_caching": config.prefix_cache,
        "scheduling_policy": config.policy,
        "seed": config.seed if config.seed is not None else span.seed if span else int.from_bytes(os.urandom(4)),
        "disable_log_stats": True,  # the log lines; the counters come by a logger of our own
        "generation_config": "vllm",  # unset parameters are raytide's defaults, not the model's
        "worker_extension_cls": "raytide.actors.engine.backends.vllm.worker_extension.EndsWithParent",
    }
    if config.max_loras:
        arguments |= {"enable_lora": True, "max_loras": config.max_loras, "max_lora_rank": config.max_lora_rank}
    if is_cpu:
        arguments |= _on_cpu(config)
    arguments = {name: value for name, value in arguments.items() if value is not None} | config.vllm
    if span is not None:
        arguments |= span.arguments()
    missing = sorted(arguments.keys() - set(known) - _OPTIONAL)
    if missing:
        raise ConfigError(
            f"this vLLM has no engine argument {', '.join(missing)}.", hint="raytide is made for vLLM 0.32 and later."
        )
    return {name: value for name, value in arguments.items() if name in known}


def _on_cpu(config: VllmConfig) -> dict[str, Any]:
    """Returns arguments for CPUs. vLLM's compiler gains nothing there, and the first requests would wait for it. A
    prompt that is computed in chunks with a seed kills vLLM's core there ("CPU Generator does not use offset"), so a
    step must hold the longest prompt.
    """
    budget = config.max_model_len and max(config.max_batch_tokens or _BATCH_TOKENS, config.max_model_len)
    arguments = {"enforce_eager": True, "enable_chunked_prefill": False, "max_num_batched_tokens": budget}
    return arguments | ({"distributed_executor_backend": "uni"} if _world_size(config) == 1 else {})


@contextmanager
def environment(config: VllmConfig, threads: int, host: str = "127.0.0.1") -> Iterator[None]:
    """Sets the environment variables that vLLM reads when it starts, except those that the user has set. Removes
    VLLM_CPU_KVCACHE_SPACE even if the user has set it, because `kv_memory_gb` sets the size. Other nodes reach vLLM at
    `host`.

    Restores the environment after the block, because vLLM itself sets LD_PRELOAD, which no other child process may
    inherit.
    """
    wanted = {
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_HOST_IP": host,
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        # Pinned threads of two replicas on one node would share the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if config.vllm.get("enforce_eager", True):
        wanted["TORCHDYNAMO_DISABLE"] = "1"  # or the first request with log probabilities waits for a compiler
    if _world_size(config) == 1:
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model in the core's process, not in one more behind it
    before = dict(os.environ)
    os.environ.update({name: value for name, value in wanted.items() if name not in before})
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over kv_memory_gb, in whole GiB
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _world_size(config: VllmConfig) -> int:
    sizes = [config.vllm.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data")]
    return max(int(size) for size in sizes)
