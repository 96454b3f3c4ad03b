"""Starts vLLM's AsyncLLM. Features are detected from function signatures, not from vLLM's version. Every error message
says what to do.
"""

from __future__ import annotations

import inspect
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raytide.actors.engine.backends.vllm.config import Span, VllmConfig, engine_arguments, environment
from raytide.actors.engine.backends.vllm.torch_packages import broken_torch_packages, removal
from raytide.actors.engine.model.parallel.launcher import Invitation, LocalMembers
from raytide.actors.engine.types import Feature
from raytide.core.errors import ConfigError, EngineError, RaytideError
from raytide.core.io.process import free_port

_GRACE_S = 1.0
_ALWAYS: frozenset[Feature] = frozenset(
    (
        "logit_bias",
        "logprobs",
        "min_tokens",
        "n",
        "penalties",
        "prompt_logprobs",
        "resume",
        "sampling",
        "stop_strings",
    )
)


class StepRecorder:
    """A vLLM stat logger, which vLLM's core calls after every step.

    It counts steps and preemptions, averages the time of a step, and keeps the latest number of running requests and
    the latest use of the KV cache.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.step_ms = 0.0
        self.running = 0
        self.kv_usage = 0.0
        self.preemptions = 0
        self._last_s = 0.0

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: object, **__: object) -> None:
        now = time.monotonic()
        self.preemptions += getattr(iteration_stats, "num_preempted_reqs", 0)
        if scheduler_stats is None:
            return
        if self.running:  # otherwise it was idle until now
            self.step_ms += ((now - self._last_s) * 1e3 - self.step_ms) * (0.1 if self.step_ms else 1.0)
        self.steps += 1
        self.running = scheduler_stats.num_running_reqs
        self.kv_usage = scheduler_stats.kv_cache_usage
        self._last_s = now

    def log_engine_initialized(self) -> None:
        """Does nothing; vLLM requires this method of every stat logger."""

    def log(self) -> None:
        """Does nothing; vLLM requires this method of every stat logger."""

    def record_sleep_state(self, *_: object) -> None:
        """Does nothing; vLLM requires this method of every stat logger."""


@dataclass(frozen=True, slots=True)
class VllmCore:
    """A running vLLM, with its features, its limits and the Python modules of vLLM."""

    llm: Any
    recorder: StepRecorder
    features: frozenset[Feature]
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    modules: Mapping[str, Any]

    @property
    def is_dead(self) -> bool:
        return bool(self.llm.errored)

    def shutdown(self) -> None:
        """Stops vLLM's process and blocks until it has ended. vLLM's own cleanup may take many seconds. If the
        installed vLLM accepts a timeout for its shutdown, the cleanup is cut off after 1 s.
        """
        if "timeout" in _parameters(self.llm, "shutdown"):
            self.llm.shutdown(timeout=_GRACE_S)
        else:
            self.llm.shutdown()


def launch(config: VllmConfig, launcher: LocalMembers | None = None, size: int = 1) -> VllmCore:
    """Starts vLLM and returns it. Blocks while the model loads.

    If `launcher` is set, `size` nodes run the model together. The launcher sends an address of this node to the
    other nodes, and this node waits there for their connections. Raises ConfigError for problems that the user can
    fix, and EngineError for all other problems.
    """
    import torch

    span = None
    if launcher is not None:
        seed = secrets.randbits(32)
        span = Span(size, 0, launcher.host, free_port(), launcher.host, seed)
        launcher.launch(Invitation(span.host, span.port, str(seed), size))
    with environment(config, torch.get_num_threads(), span.own_host if span else "127.0.0.1"):
        modules = import_vllm()
        recorder = StepRecorder()
        try:
            built = engine_args(config, modules, span)
            llm = modules["async_llm"].AsyncLLM.from_engine_args(built, stat_loggers=[lambda *_: recorder])
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ConfigError(f"vLLM refuses this model or these options: {_first(error)}") from error
        except RaytideError:
            raise
        except Exception as error:
            raise EngineError(
                f"vLLM did not start: {_first(error)}",
                hint="Its own log on stderr says why; VLLM_LOGGING_LEVEL=INFO says more.",
            ) from error
    return _describe(llm, recorder, config, modules)


def engine_args(config: VllmConfig, modules: Mapping[str, Any], span: Span | None = None) -> Any:
    """Returns vLLM's AsyncEngineArgs. If the engine runs on several nodes, `span` describes this node. All nodes need
    the same arguments, except for rank and address.
    """
    platform = modules["platforms"].current_platform
    _check_device(config.device, str(platform.device_type))
    arguments_class = modules["arg_utils"].AsyncEngineArgs
    known = inspect.signature(arguments_class).parameters
    built = arguments_class(**engine_arguments(config, known, platform.device_type == "cpu", span))
    if not (config.any_whitespace or "structured_outputs_config" in config.vllm):
        compact = {"backend": "guidance", "disable_any_whitespace": True}  # "auto" cannot do without
        built.structured_outputs_config = type(built.structured_outputs_config)(**compact)
    return built


def _describe(llm: Any, recorder: StepRecorder, config: VllmConfig, modules: Mapping[str, Any]) -> VllmCore:
    cache, model = llm.vllm_config.cache_config, llm.vllm_config.model_config
    return VllmCore(
        llm=llm,
        recorder=recorder,
        features=_features(llm, config, modules),
        max_model_len=int(model.max_model_len),
        vocab_size=int(model.get_vocab_size()),
        block_size=int(cache.block_size),
        num_blocks=int(cache.num_gpu_blocks) - 1,  # one is vLLM's placeholder
        modules=modules,
    )


def _features(llm: Any, config: VllmConfig, modules: Mapping[str, Any]) -> frozenset[Feature]:
    found: set[Feature] = set(_ALWAYS)
    fields = inspect.signature(modules["sampling_params"].SamplingParams).parameters
    if config.prefix_cache:
        found.add("prefix_cache")
    if config.policy == "priority" and "priority" in inspect.signature(llm.generate).parameters:
        found.add("priority")
    if config.max_loras and hasattr(llm, "add_lora") and hasattr(llm, "remove_lora"):
        found.add("lora")
    if "mode" in _parameters(llm, "pause_generation") and hasattr(llm, "resume_generation"):
        found.add("pause")
        # Other nodes may have no copy of the new weights.
        is_alone = getattr(llm.vllm_config.parallel_config, "nnodes", 1) == 1
        if is_alone and "reset_running_requests" in _parameters(llm, "reset_prefix_cache") and _reads_weights(config):
            found.add("weights_swap")
    if not config.vllm.get("skip_tokenizer_init"):  # both need a tokenizer in vLLM too
        found |= {"bad_words"} if "bad_words" in fields else set()
        found |= {"structured"} if "structured_outputs" in fields else set()
    return frozenset(found)


def _reads_weights(config: VllmConfig) -> bool:
    """Returns whether vLLM's workers can later replace their weights by reading plain safetensors again."""
    is_plain = config.vllm.get("load_format", "auto") in ("auto", "safetensors") and not config.vllm.get("quantization")
    return is_plain and any(Path(config.model_dir).glob("*.safetensors"))


def _parameters(target: object, method: str) -> Mapping[str, object]:
    found = getattr(target, method, None)
    return inspect.signature(found).parameters if found is not None else {}


def import_vllm() -> dict[str, Any]:
    """Imports vLLM and returns its modules by short names. If a module cannot be imported, raises a ConfigError that
    says what to do.
    """
    if find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed.",
            hint="In a checkout run ./dev setup --vllm (vLLM for CPU); elsewhere pip install 'raytide[vllm]'.",
        )
    try:
        return {
            "arg_utils": import_module("vllm.engine.arg_utils"),
            "async_llm": import_module("vllm.v1.engine.async_llm"),
            "exceptions": import_module("vllm.exceptions"),
            "inputs": import_module("vllm.inputs"),
            "lora": import_module("vllm.lora.request"),
            "platforms": import_module("vllm.platforms"),
            "sampling_params": import_module("vllm.sampling_params"),
        }
    except Exception as error:  # a broken library may raise anything on import
        broken = broken_torch_packages()
        if broken:
            raise ConfigError(
                f"vLLM cannot be imported, because {', '.join(broken)} cannot be: a build for CUDA beside a CPU torch.",
                hint=f"Nothing needs them: {removal(broken)}",
            ) from error
        raise ConfigError(f"vLLM cannot be imported: {_first(error)}", hint="Run raytide doctor.") from error


def _check_device(device: str, actual: str) -> None:
    if device not in ("auto", actual):
        raise ConfigError(
            f"device {device!r} was asked for, but the installed vLLM is built for {actual}.",
            hint="Leave device at auto, or install the other build of vLLM.",
        )


def _first(error: BaseException) -> str:
    """Returns an error's type and first three lines as one line, since vLLM's messages can be pages long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:400]}"
