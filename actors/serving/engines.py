"""The engines a replica can run, by the `kind` in `ServeSpec.engine`; the other keys are that engine's own options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raytide.actors.engine.base import Engine
from raytide.core.endpoint import ServeSpec
from raytide.core.errors import ConfigError

__all__ = ["ENGINES", "build_engine"]


def _native(spec: ServeSpec, options: dict[str, Any]) -> Engine:
    from raytide.actors.engine.config import EngineConfig
    from raytide.actors.engine.native import NativeEngine

    config = {"model_dir": spec.model, **options}
    return NativeEngine(EngineConfig.parse(config, where=f"engine options of endpoint {spec.name}"))


def _vllm(spec: ServeSpec, options: dict[str, Any]) -> Engine:
    from raytide.actors.engine.vllm import VllmEngine
    from raytide.actors.engine.vllm_config import VllmConfig

    config = {"model_dir": spec.model, **options}
    return VllmEngine(VllmConfig.parse(config, where=f"engine options of endpoint {spec.name}"))


def _fake(spec: ServeSpec, options: dict[str, Any]) -> Engine:
    from raytide.actors.engine.fake import FakeEngine

    try:
        return FakeEngine(model=spec.name, **options)
    except TypeError as error:
        raise ConfigError(f"engine options of endpoint {spec.name}: {error}.") from None


ENGINES: dict[str, Callable[[ServeSpec, dict[str, Any]], Engine]] = {"fake": _fake, "native": _native, "vllm": _vllm}


def build_engine(spec: ServeSpec) -> Engine:
    """Not started yet. Raises ConfigError when the spec's engine options make no sense."""
    options = dict(spec.engine)
    kind = str(options.pop("kind", "native"))
    if kind not in ENGINES:
        raise ConfigError(
            f"endpoint {spec.name} asks for engine {kind!r}.", hint=f"The engines are: {', '.join(sorted(ENGINES))}."
        )
    return ENGINES[kind](spec, options)
