"""Estimates the speed of one replica of a served model, and the number of replicas that meet a request rate and an SLO.
The speed comes from a roofline model.

The estimates are first guesses of whether a replica fits, and of how many replicas are needed. Measured speeds later
replace the estimated speeds (`autoscaler/endpoints`). Published predictors of this kind are off by up to 47 % for
time to first token. The module also refuses specs whose replicas cannot fit into the memory of any GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raytide.core.errors import CapacityError
from raytide.core.objects.endpoint import ServeSpec, Speed
from raytide.core.objects.node import TYPE_LABEL, NodeType, labels_match
from raytide.sizing.devices import GB, Accelerator, gpu_memory_gb
from raytide.sizing.model_shape import ModelShape

UTILIZATION = 0.9
"""The share of a GPU's memory that an engine uses."""
COMPUTE_EFFICIENCY = 0.6
MEMORY_EFFICIENCY = 0.85
_HOST_S = 0.001
"""The seconds of scheduling and sampling around a decode step."""
_OTHER_BYTES = 2e9
"""The bytes of one GPU's CUDA context, graphs and collectives."""
_ACTIVATION_FACTORS = {1: 10, 2: 6, 4: 5, 8: 5}
"""The factor in the bytes of a step's activations, 2 * tokens * h * factor, by the number of tensor ranks
(AIConfigurator); at least 70 MiB.
"""
_LEAST_ACTIVATIONS = 70 << 20
_MOST_LOAD = 0.8
"""The utilization above which queues grow too fast for an SLO."""
KV_MEMORY_GB = 1.0
"""The engines' default of `kv_memory_gb`."""


@dataclass(frozen=True, slots=True)
class ServingLoad:
    """The request rate and request sizes of an endpoint, and the SLO on latency."""

    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    kv_dtype: Literal["auto", "int8"] = "auto"
    """The numbers in the KV caches, as in the engine's option of this name: 16 bits, or 8 bits with a 32-bit scale for
    each head.
    """

    def kv_bytes_each(self, head_dim: int) -> float:
        """Returns the bytes of one element of the KV cache."""
        return 1.0 + 4.0 / head_dim if self.kv_dtype == "int8" else 2.0


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """The plan for an endpoint: a replica on GPUs of one kind, and the number of such replicas that a load needs."""

    device: Accelerator
    gpus: int
    """The number of GPUs of one replica, which divide the model by tensor parallelism."""
    slots: int
    """The number of sequences that a replica decodes at once."""
    kv_bytes_per_token: float
    kv_bytes: float
    """The bytes available for KV caches on all GPUs of the replica."""
    ttft_s: float
    """The seconds of a prompt's prefill on an idle replica."""
    tpot_s: float
    """The seconds between tokens while all slots are used."""
    prefill_tps: float
    requests_per_s: float
    """The requests per second that one replica serves."""
    replicas: int
    binding: str
    usd_per_h: float

    @property
    def speed(self) -> Speed:
        """The replica's speed in the form of `replicas.speed` in a ServeSpec. The autoscaler uses this form."""
        return Speed(prefill_tps=self.prefill_tps, slots=self.slots, tpot_ms=max(1e-3, self.tpot_s * 1e3))

    def json(self) -> dict[str, object]:
        return {
            "gpu": self.device.name,
            "gpus_per_replica": self.gpus,
            "replicas": self.replicas,
            "gpus": self.gpus * self.replicas,
            "slots": self.slots,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "kv_bytes": round(self.kv_bytes),
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "requests_per_s": self.requests_per_s,
            "binding": self.binding,
            "usd_per_h": self.usd_per_h,
            "speed": self.speed.model_dump(mode="json"),
        }


def prefill_seconds(
    model: ModelShape, tokens: int, device: Accelerator, gpus: int = 1, *, efficiency: float = COMPUTE_EFFICIENCY
) -> float:
    """Returns the time of a prefill of `T` tokens in seconds: (2 N T + 2 L a d T^2) / (n peak eff).

    The first term is the matrix products with the `N` active weights. The second term is causal attention with `L`
    layers, each of which has `a` heads of dimension `d`. In a layer with a window, a token sees fewer tokens. The
    denominator is the rate of `n` GPUs at the efficiency `eff`.
    """
    flops = 2.0 * tokens * (model.active_parameters + model.attention_width * model.spans(tokens))
    return flops / (gpus * device.peak_flops("bf16") * efficiency)


def decode_seconds(
    model: ModelShape,
    batch: int,
    context: float,
    device: Accelerator,
    gpus: int = 1,
    *,
    memory_efficiency: float = MEMORY_EFFICIENCY,
    compute_efficiency: float = COMPUTE_EFFICIENCY,
    host_s: float = _HOST_S,
    kv_bytes_each: float = 2.0,
) -> float:
    """Returns the time in seconds of one decode step of `batch` sequences with `context` tokens each. It is the sum of
    three parts:

    - the time to read the weights and KV caches, or the time to compute if that is longer
    - the all-reduces of the tensor ranks
    - the work of the host
    """
    weights = model.weight_bytes * min(model.parameters, batch * model.active_parameters)
    moved = weights + batch * model.tokens_read(context) * model.kv_bytes_per_token(kv_bytes_each)
    reading = moved / (gpus * device.bandwidth * memory_efficiency)
    computing = 2.0 * model.active_parameters * batch / (gpus * device.peak_flops("bf16") * compute_efficiency)
    reduced = 2.0 * model.width * batch * 2 * (gpus - 1) / gpus / device.link + 2 * (gpus - 1) * device.link_latency_s
    return max(reading, computing) + (2 * model.layers * reduced if gpus > 1 else 0.0) + host_s


def kv_room(model: ModelShape, device: Accelerator, gpus: int, batch_tokens: int = 8192) -> float:
    """Returns the bytes that are left for KV caches on all GPUs of a replica. The number is negative if the weights do
    not fit.
    """
    factor = _ACTIVATION_FACTORS[max(ranks for ranks in _ACTIVATION_FACTORS if ranks <= gpus)]
    activations = max(_LEAST_ACTIVATIONS, 2.0 * batch_tokens * model.width * factor)
    per_gpu = (
        UTILIZATION * device.memory_gb * GB - model.weight_bytes * model.parameters / gpus - activations - _OTHER_BYTES
    )
    return per_gpu * gpus


def plan_replicas(
    model: ModelShape, load: ServingLoad, device: Accelerator, gpus: int, usd_per_gpu_h: float = 0.0
) -> ReplicaPlan | None:
    """Returns the number of replicas that the load needs, and the speed of one replica. Each replica has `gpus` GPUs.

    Returns None if the model does not fit on these GPUs, or if an idle replica already misses the SLO. A replica
    does not decode while it prefills. A request therefore takes two amounts of the replica's time: its prefill time,
    and its decode time divided by the number of slots.
    """
    room = kv_room(model, device, gpus)
    context = load.prompt_tokens + load.output_tokens
    kv_bytes_each = load.kv_bytes_each(model.head_dim)
    tokens = model.kv_bytes_per_token(kv_bytes_each) * max(
        1.0, gpus / model.kv_heads
    )  # beyond the KV heads they are copied
    slots = int(room // (context * tokens)) if room > 0 else 0
    ttft_s = prefill_seconds(model, load.prompt_tokens, device, gpus) + _HOST_S
    if slots < 1 or (load.slo_ttft_s is not None and ttft_s > load.slo_ttft_s):
        return None
    middle = load.prompt_tokens + load.output_tokens / 2.0
    binding = "KV cache"
    if load.slo_tpot_s is not None:
        able = _most_slots(model, middle, device, gpus, slots, load.slo_tpot_s, kv_bytes_each)
        if able == 0:
            return None
        slots, binding = (able, "time between tokens") if able < slots else (slots, binding)
    tpot_s = decode_seconds(model, slots, middle, device, gpus, kv_bytes_each=kv_bytes_each)
    prefill_s = ttft_s - _HOST_S
    # in a second, each request takes its prompt's time from all slots, and its output's time from one of them
    per_request_s = prefill_s + load.output_tokens * tpot_s / slots
    rate = _MOST_LOAD / per_request_s
    if prefill_s > load.output_tokens * tpot_s / slots:
        binding = "prefill"
    replicas = max(1, math.ceil(load.requests_per_s / rate))
    return ReplicaPlan(
        device=device,
        gpus=gpus,
        slots=slots,
        kv_bytes_per_token=tokens,
        kv_bytes=room,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        prefill_tps=load.prompt_tokens / prefill_s,
        requests_per_s=rate,
        replicas=replicas,
        binding=binding,
        usd_per_h=replicas * gpus * usd_per_gpu_h,
    )


def _most_slots(
    model: ModelShape,
    context: float,
    device: Accelerator,
    gpus: int,
    most: int,
    slo_tpot_s: float,
    kv_bytes_each: float,
) -> int:
    """Returns the largest number of sequences, at most `most`, with which a decode step stays within the SLO; its time
    grows with their number.
    """
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        fast = decode_seconds(model, middle, context, device, gpus, kv_bytes_each=kv_bytes_each) <= slo_tpot_s
        low, high = (middle, high) if fast else (low, middle - 1)
    return low


def check_memory(spec: ServeSpec, weight_bytes: int, node_types: Sequence[NodeType]) -> ServeSpec:
    """Returns the spec restricted to the node types whose GPUs can hold a replica. Raises CapacityError if there is no
    such node type.

    `weight_bytes` is the size of the model's files. GPUs of unknown memory are assumed to be large enough. A replica
    without GPUs is checked only if it declares `memory`.
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
    """Returns the bytes that an engine reserves for its KV cache; 0 if its options give a number of blocks instead."""
    own = engine.get("vllm")
    own = own if isinstance(own, Mapping) else {}
    if engine.get("num_blocks") is not None or "num_gpu_blocks_override" in own:
        return 0
    given = own.get("kv_cache_memory_bytes", GB * _number(engine.get("kv_memory_gb", KV_MEMORY_GB)))
    return int(_number(given))


def _number(value: object) -> float:
    """Returns an engine's option as a number; 0.0 for a value that the engine rejects."""
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e18 else 0.0


def _gb(size: float) -> str:
    return f"{size / GB:.3g} GB"
