"""The engines of replicas. The key `kind` in `ServeSpec.engine` chooses an engine. The other keys are options of that
engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytide.actors.engine.base import Engine
from raytide.actors.engine.model.parallel.launcher import NATIVE_MEMBER
from raytide.actors.models.quantized.gguf.gguf_file import is_gguf
from raytide.actors.models.quantized.gguf.packaged_models import PACKAGED_MODELS
from raytide.core.errors import ConfigError
from raytide.core.io.private_paths import check_named
from raytide.core.logs import logger
from raytide.core.objects.endpoint import MOST_ADAPTERS, ServeSpec

if TYPE_CHECKING:
    from raytide.actors.engine.backends.vllm.config import VllmConfig
    from raytide.actors.engine.model.parallel.launcher import LocalMembers

log = logger(__name__)

_VLLM_UTILIZATION = 0.92
"""vLLM's own default for the share of a whole GPU's memory."""


def _native(spec: ServeSpec, model_dir: str, options: dict[str, Any], launcher: LocalMembers | None) -> Engine:
    from raytide.actors.engine.backends.native.engine import NativeEngine
    from raytide.actors.engine.config import EngineConfig

    config = {
        "model_dir": model_dir,
        "max_loras": 2 * MOST_ADAPTERS,  # old ones leave after the new came
        "tensor_parallel": _processes(spec)[0],
        **options,
    }
    return NativeEngine(EngineConfig.parse(config, where=f"engine options of endpoint {spec.name}"), launcher)


def _vllm(spec: ServeSpec, model_dir: str, options: dict[str, Any], launcher: LocalMembers | None) -> Engine:
    from raytide.actors.engine.backends.vllm.engine import VllmEngine

    return VllmEngine(vllm_config(spec, model_dir, options), launcher=launcher, members=spec.members)


def vllm_config(spec: ServeSpec, model_dir: str, options: dict[str, Any]) -> VllmConfig:
    """Returns the configuration of vLLM, equal on all members of a replica. Raises ConfigError for bad options."""
    from raytide.actors.engine.backends.vllm.config import VllmConfig

    config = {"model_dir": model_dir, **options}
    share = spec.resources.get("GPU", 0.0)
    if isinstance(own := options.get("vllm", {}), dict):
        if 0 < share < 1:
            # vLLM refuses to start where less than this is free: without it, beside another replica on the same GPU
            config["vllm"] = {"gpu_memory_utilization": round(_VLLM_UTILIZATION * share, 4), **own}
        if spec.members > 1:
            tensor, stages = vllm_sizes(spec)
            config["vllm"] = {**own, "tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
    return VllmConfig.parse(config, where=f"engine options of endpoint {spec.name}")


def vllm_sizes(spec: ServeSpec) -> tuple[int, int]:
    """Returns vLLM's tensor parallel size and pipeline parallel size for a replica of several members.

    By default each member has a part of the layers, and the member's GPUs share each layer, because that needs the
    least traffic between nodes. Without GPUs, all members share each layer.

    Raises ConfigError unless the product of the sizes is a multiple of the number of members. Also raises ConfigError
    for a pipeline without GPUs, because vLLM 0.32 on CPUs then stops at the first request.
    """
    own = spec.engine.get("vllm")
    own = own if isinstance(own, dict) else {}
    has_gpu = spec.resources.get("GPU", 0.0) > 0
    each = max(1, int(spec.resources.get("GPU", 0.0)))

    def others(size: object) -> int:
        """Returns the number of groups of this size in the replica."""
        return max(1, each * spec.members // size) if isinstance(size, int) and size > 0 else 1

    tensor, stages = (own.get(f"{kind}_parallel_size") for kind in ("tensor", "pipeline"))
    if tensor is None:
        tensor = others(stages) if stages is not None else each if has_gpu else spec.members
    if stages is None:
        stages = others(tensor)
    if stages != 1 and not has_gpu:
        raise ConfigError(
            f"endpoint {spec.name} asks for pipeline_parallel_size {stages!r} on CPUs, where vLLM has no pipeline.",
            hint="Leave it out: all members share each layer. Or serve with engine kind native.",
        )
    is_whole = isinstance(tensor, int) and isinstance(stages, int) and min(tensor, stages) > 0
    if is_whole and tensor * stages % spec.members == 0:
        return tensor, stages
    raise ConfigError(
        f"endpoint {spec.name} has vLLM's tensor_parallel_size {tensor!r} and pipeline_parallel_size {stages!r}, and "
        f"{spec.members} members a replica.",
        hint="Give whole numbers whose product the members divide, or leave both out.",
    )


def _fake(spec: ServeSpec, model_dir: str, options: dict[str, Any], _: LocalMembers | None) -> Engine:
    from raytide.actors.engine.backends.fake import FakeEngine

    try:
        return FakeEngine(model=spec.name, **options)
    except TypeError as error:
        raise ConfigError(f"engine options of endpoint {spec.name}: {error}.") from None


ENGINES: dict[str, Callable[[ServeSpec, str, dict[str, Any], LocalMembers | None], Engine]] = {
    "fake": _fake,
    "native": _native,
    "vllm": _vllm,
}


@dataclass(frozen=True, slots=True)
class EngineChoice:
    kind: str
    why: str


def choose_engine(spec: ServeSpec) -> EngineChoice:
    """Returns the engine for the spec's replicas, with the reason for this choice. The engine is the one that the spec
    names as `kind`. For the kind `auto`, it is the engine that fits the device.

    Raises ConfigError for an unknown kind, and for options or adapters that do not fit the engine or the number of
    members.
    """
    asked = str(spec.engine.get("kind", "auto"))
    if asked == "auto":
        choice = _automatic(spec)
    elif asked not in ENGINES:
        raise ConfigError(
            f"endpoint {spec.name} asks for engine {asked!r}.",
            hint=f"The engines are: auto, {', '.join(sorted(ENGINES))}.",
        )
    elif asked == "native" and spec.resources.get("GPU"):
        choice = EngineChoice("native", f"its options name it. {UNMEASURED}")
    else:
        choice = EngineChoice(asked, "its options name it.")
    if spec.adapters and choice.kind == "vllm" and not spec.engine.get("max_loras"):
        raise ConfigError(
            f"endpoint {spec.name} has adapters, but engine vllm was asked for none.",
            hint="Set `engine: {max_loras: NUMBER}`: vLLM makes room for that many when it starts.",
        )
    size = _size(spec, choice.kind)
    elsewhere = [location for location in spec.adapters.values() if "://" in location]
    if size > 1 and spec.members > 1 and elsewhere:
        raise ConfigError(
            f"endpoint {spec.name} has adapter {elsewhere[0]}, which is copied to the first member's node alone.",
            hint="Put it into a directory that all nodes see, or let one node compute the replica.",
        )
    if size > 1:
        over = "" if spec.members == 1 else f" on {spec.members} members"
        choice = EngineChoice(choice.kind, f"{choice.why} Each replica computes with {size} processes{over}.")
    return choice


def _size(spec: ServeSpec, kind: str) -> int:
    """Returns the number of processes that compute a replica, as far as raytide decides it."""
    if kind == "native":
        return num_processes(spec)
    return math.prod(vllm_sizes(spec)) if kind == "vllm" and spec.members > 1 else 1


UNMEASURED = (
    "On a GPU its kernels are unmeasured, and where Triton does not work it runs on torch's reference operators, which "
    "are slow; engine kind vllm is made for GPUs."
)


def num_processes(spec: ServeSpec) -> int:
    """Returns the number of processes that compute one replica of the native engine. The default is one process per
    member. The engine's options can ask for more.

    Raises ConfigError unless all members have the same number of processes.
    """
    tensor, stages = _processes(spec)
    return tensor * stages


def _processes(spec: ServeSpec) -> tuple[int, int]:
    """Returns the number of processes that share each layer, and the number of pipeline stages. By default there is one
    stage, and all members of a replica share each layer.
    """
    stages = spec.engine.get("pipeline_parallel", 1)
    by_stage = spec.members // stages if isinstance(stages, int) and stages > 0 else 1
    tensor = spec.engine.get("tensor_parallel", max(1, by_stage))
    if isinstance(tensor, int) and isinstance(stages, int) and min(tensor, stages) > 0:
        size = tensor * stages
        if size % spec.members == 0:
            return tensor, stages
    over = "" if stages == 1 else f", pipeline_parallel {stages!r}"
    raise ConfigError(
        f"endpoint {spec.name} has tensor_parallel {tensor!r}{over} and {spec.members} members a replica.",
        hint="Give whole numbers whose product the members divide, or leave both out: one process on each member.",
    )


def check_members(spec: ServeSpec) -> None:
    """Raises ConfigError if the processes of a replica cannot divide the model's heads evenly, if there are more
    pipeline stages than layers, or if several processes would compute a model that reads images. Does nothing for a
    model that cannot be read on this node.
    """
    from raytide.actors.engine.model.parallel.shard import check_divides
    from raytide.actors.models.families import read_architecture

    if num_processes(spec) > 1 and Path(spec.model, "config.json").is_file():
        check_divides(read_architecture(Path(spec.model), serves=True), *_processes(spec))


def _automatic(spec: ServeSpec) -> EngineChoice:
    """Returns vLLM if replicas have GPUs, and the native engine on CPUs and for GGUF files. Engine options such as
    `device: cpu` do not change that.
    """
    if is_gguf(spec.model) or spec.model in PACKAGED_MODELS:
        why = "its model is a GGUF file, which it reads."
        return EngineChoice("native", f"{why} {UNMEASURED}" if spec.resources.get("GPU") else why)
    if spec.resources.get("GPU"):
        return EngineChoice("vllm", "its replicas have GPUs, and vLLM's kernels are made for them.")
    return EngineChoice("native", "its replicas have no GPU, and on CPUs raytide's own engine is the faster one.")


def member_module(spec: ServeSpec) -> tuple[str, dict[str, Any]]:
    """Returns the name of a Python module and its options. The members of a replica on its other nodes run this
    module.
    """
    if choose_engine(spec).kind != "vllm":
        return NATIVE_MEMBER, {}
    from raytide.actors.engine.backends.vllm.member import MODULE

    options = {key: value for key, value in spec.engine.items() if key != "kind"}
    return MODULE, {"config": vllm_config(spec, spec.model, options).model_dump(mode="json")}


def build_engine(spec: ServeSpec, model_dir: str | None = None, launcher: LocalMembers | None = None) -> Engine:
    """Returns the spec's engine, not started yet.

    `model_dir` is the local copy of a model from an object store. `launcher` starts the other members of a replica.
    Raises ConfigError if the options make no sense, or if the chosen engine is not installed on this node. Raises
    DeniedError for paths that are private or outside the data roots. For this check, links in the paths are resolved on
    this node.
    """
    check_named({"model": spec.model, "engine": spec.engine}, f"endpoint {spec.name}", links=True)
    choice = choose_engine(spec)
    if choice.kind == "vllm" and find_spec("vllm") is None:
        raise ConfigError(
            f"endpoint {spec.name} runs on vLLM, which is not installed here: {choice.why}",
            hint="Install it on the nodes (`./dev setup --vllm` for CPUs, `pip install vllm` for GPUs), or serve with "
            f"engine kind native. {UNMEASURED}",
        )
    if UNMEASURED in choice.why:
        log.warning("the native engine is unmeasured on GPUs", extra={"endpoint": spec.name, "why": choice.why})
    options = {key: value for key, value in spec.engine.items() if key != "kind"}
    return ENGINES[choice.kind](spec, model_dir or spec.model, options, launcher)
