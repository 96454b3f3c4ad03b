"""The engines a replica can run, by the `kind` in `ServeSpec.engine`; the other keys are that engine's own options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raytide.actors.engine.base import Engine
from raytide.core.errors import ConfigError
from raytide.core.objects.endpoint import ServeSpec

__all__ = ["ENGINES", "build_engine"]


def _native(spec: ServeSpec, options: dict[str, Any]) -> Engine:
    from raytide.actors.engine.backends.native.engine import NativeEngine
    from raytide.actors.engine.config import EngineConfig

    config = {"model_dir": spec.model, **options}
    return NativeEngine(EngineConfig.parse(config, where=f"engine options of endpoint {spec.name}"))


def _vllm(spec: ServeSpec, options: dict[str, Any]) -> Engine:
    from raytide.actors.engine.backends.vllm.config import VllmConfig
    from raytide.actors.engine.backends.vllm.engine import VllmEngine

    config = {"model_dir": spec.model, **options}
    return VllmEngine(VllmConfig.parse(config, where=f"engine options of endpoint {spec.name}"))


def _fake(spec: ServeSpec, options: dict[str, Any]) -> Engine:
    from raytide.actors.engine.backends.fake import FakeEngine

    try:
        return FakeEngine(model=spec.name, **options)
    except TypeError as error:
        raise ConfigError(f"engine options of endpoint {spec.name}: {error}.") from None


ENGINES: dict[str, Callable[[ServeSpec, dict[str, Any]], Engine]] = {"fake": _fake, "native": _native, "vllm": _vllm}
SPANNING = frozenset({"fake"})
"""Those that can use a replica of several members."""


def build_engine(spec: ServeSpec) -> Engine:
    """Not started yet. Raises ConfigError when the spec's engine options make no sense."""
    options = dict(spec.engine)
    kind = check_engine(spec)
    options.pop("kind", None)
    return ENGINES[kind](spec, options)


def check_engine(spec: ServeSpec) -> str:
    """The kind of its engine; ConfigError when there is none of it, or when it cannot use all members of a replica."""
    kind = str(spec.engine.get("kind", "native"))
    if kind not in ENGINES:
        raise ConfigError(
            f"endpoint {spec.name} asks for engine {kind!r}.", hint=f"The engines are: {', '.join(sorted(ENGINES))}."
        )
    if spec.members > 1 and kind not in SPANNING:
        raise ConfigError(
            f"endpoint {spec.name} asks for replicas of {spec.members} members, but engine {kind} computes on one.",
            hint="Give one member more resources, or serve a smaller model.",
        )
    return kind
