"""The memory of an endpoint's replica: its weights and its KV cache must fit into its share of a GPU, or into its
`memory`. Models whose shares of one GPU hold them fit on it together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raytide.core.errors import CapacityError
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.objects.node import TYPE_LABEL, NodeType, labels_match
from raytide.sizing.devices import GB, gpu_memory_gb

KV_MEMORY_GB = 1.0
"""The engines' default of `kv_memory_gb`."""


def check_memory(spec: ServeSpec, weight_bytes: int, node_types: Sequence[NodeType]) -> ServeSpec:
    """Returns the spec, bound to the node types whose GPUs hold its replicas if others of its types do not.

    `weight_bytes` are those of the model's files. Node types whose GPUs have unknown memory are taken to hold them, and
    replicas without GPUs and `memory` are not checked. Raises CapacityError if nothing holds them.
    """
    if (kept_gb := _number(spec.engine.get("weights_memory_gb"))) > 0:  # the others stay in the files
        weight_bytes = min(weight_bytes, int(kept_gb * GB))
    needed = weight_bytes + _kv_bytes(spec.engine)
    gpus = 0.0 if spec.engine.get("device") == "cpu" else spec.resources.get("GPU", 0.0)
    memory = spec.resources.get("memory", 0.0)
    what = (
        f"endpoint {spec.name}: its weights ({_gb(weight_bytes)}) and its KV cache ({_gb(_kv_bytes(spec.engine))}) need"
    )
    if not gpus:
        if memory and memory * spec.members < needed:
            raise CapacityError(
                f"{what} {_gb(needed)}; a replica has memory {_gb(memory * spec.members)}.",
                hint="Ask for more memory, lower engine.kv_memory_gb, or serve a smaller model.",
            )
        return spec
    allowed = [t for t in node_types if any(labels_match(spec.labels, t.all_labels(zone)) for zone in t.zones)]
    shares = {
        each.name: None if (known := gpu_memory_gb(each)) is None else known * GB * gpus * spec.members
        for each in allowed
        if each.resources.get("GPU")
    }
    enough = sorted(name for name, share in shares.items() if share is None or share >= needed)
    if len(enough) == len(shares):
        return spec
    if not enough:
        most = max(share for share in shares.values() if share is not None)
        raise CapacityError(
            f"{what} {_gb(needed)}; {gpus:g} GPU has at most {_gb(most)} here.",
            hint="Ask for a larger share of a GPU or for more GPUs, lower engine.kv_memory_gb, or serve a smaller "
            "model.",
        )
    wanted = enough[0] if len(enough) == 1 else f"in({','.join(enough)})"
    return spec.model_copy(update={"labels": {**spec.labels, TYPE_LABEL: wanted}})


def _kv_bytes(engine: Mapping[str, Any]) -> int:
    """Returns the bytes that an engine takes for KV; 0 where its options count blocks instead."""
    own = engine.get("vllm")
    own = own if isinstance(own, Mapping) else {}
    if engine.get("num_blocks") is not None or "num_gpu_blocks_override" in own:
        return 0
    given = own.get("kv_cache_memory_bytes", GB * _number(engine.get("kv_memory_gb", KV_MEMORY_GB)))
    return int(_number(given))


def _number(value: object) -> float:
    """Returns an engine's option; 0.0 for one that the engine will refuse."""
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e18 else 0.0


def _gb(size: float) -> str:
    return f"{size / GB:.3g} GB"
