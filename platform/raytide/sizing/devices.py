"""Accelerators and the links between them. Their figures come from the vendors' data sheets. Further figures say which
share of the peak FLOP/s is reached in real runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from raytide.core.objects.node import ACCELERATOR_LABEL, NodeType
from raytide.core.specs.train import Precision

GB = 1e9
CPU_CORE_FLOPS = 40e9
"""The fp32 FLOP/s that a server's core reaches in matrix products, until `raytide bench node` has measured it."""
CPU_BANDWIDTH = 20e9
CPU_NETWORK = 1.25e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One GPU, or all CPUs of a member that has no GPUs. Rates are per second, and bandwidths are in bytes per
    second.
    """

    name: str
    memory_gb: float
    """The usable memory in 10^9 bytes; 0 if unknown."""
    bf16_tflops: float
    fp32_tflops: float
    bandwidth: float
    """Bytes a second of its memory."""
    link: float
    """The bytes a second between devices of a node, in each direction."""
    network: float
    """The bytes a second, in each direction, of one device's share of the network between nodes."""
    watts: float
    fp8_factor: float = 1.0
    """The FP8 peak divided by the bf16 peak; 1 without FP8."""
    matmul_efficiency: float = 0.82
    """The share of the peak that large matrix products reach (798 of 989 TFLOP/s on an H100)."""
    narrow_width: float = 400.0
    """The length of a product's shorter side at which it reaches half of `matmul_efficiency`; tensor parallelism makes
    products narrow. Fitted to Megatron's runs of 22e9 to 1e12 parameters (arXiv 2205.05198, table 5).
    """
    attention_efficiency: float = 0.4
    """The share of the peak that FlashAttention reaches, forward and backward."""
    overlap: float = 0.7
    """The share of computation time behind which sharded data parallelism can hide its collectives."""
    launch_s: float = 6e-6
    """The seconds that launching one operation takes."""
    link_latency_s: float = 5e-6
    network_latency_s: float = 20e-6
    pace: float = 1.93
    """The measured divided by the predicted compute time; learned from runs. The default is that of torchtitan's Llama
    3 8B on H100 (5,762 tokens/s a GPU, eager, selective checkpointing).
    """
    memory_scale: float = 1.0
    """The measured divided by the predicted bytes of activations; learned from runs."""
    is_cpu: bool = False

    def product_flops(self, precision: Precision, width: float) -> float:
        """Returns the FLOP/s that matrix products reach if their shorter side is `width`."""
        return self.peak_flops(precision) * self.matmul_efficiency * width / (width + self.narrow_width)

    def peak_flops(self, precision: Precision) -> float:
        if precision == "fp32":
            return self.fp32_tflops * 1e12
        return self.bf16_tflops * 1e12 * (self.fp8_factor if precision == "fp8" else 1.0)


def _gpu(
    name: str, memory: float, bf16: float, fp32: float, memory_gbps: float, link: float, network: float, watts: float,
    *, fp8: float = 1.0,
) -> Accelerator:  # fmt: skip
    return Accelerator(
        name=name,
        memory_gb=memory,
        bf16_tflops=bf16,
        fp32_tflops=fp32,
        bandwidth=memory_gbps * GB,
        link=link * GB,
        network=network * GB,
        watts=watts,
        fp8_factor=fp8,
    )


DEVICES: dict[str, Accelerator] = {
    device.name: device
    for device in (
        # name, GB, dense bf16 and fp32 (TF32 off) TFLOPS, GB/s of memory, link and network, W
        _gpu("B200", 192, 2250.0, 80.0, 8000, 900, 50, 1000, fp8=2.0),
        _gpu("GH200", 96, 989.4, 67.0, 4000, 450, 50, 700, fp8=2.0),
        _gpu("H200 NVL", 141, 835.5, 60.0, 4800, 450, 50, 600, fp8=2.0),
        _gpu("H200", 141, 989.4, 67.0, 4800, 450, 50, 700, fp8=2.0),
        _gpu("H100 NVL", 94, 835.5, 60.0, 3900, 300, 50, 400, fp8=2.0),
        _gpu("H100 PCIe", 80, 756.5, 51.0, 2000, 32, 25, 350, fp8=2.0),
        _gpu("H100", 80, 989.4, 67.0, 3350, 450, 50, 700, fp8=2.0),
        _gpu("H800", 80, 989.4, 67.0, 3350, 200, 50, 700, fp8=2.0),
        _gpu("A100-40G", 40, 312.0, 19.5, 1555, 300, 6.25, 400),
        _gpu("A100-80G", 80, 312.0, 19.5, 2039, 300, 25, 400),
        _gpu("A100", 80, 312.0, 19.5, 2039, 300, 25, 400),
        _gpu("A800", 80, 312.0, 19.5, 2039, 200, 25, 400),
        _gpu("L40S", 48, 362.05, 91.6, 864, 25, 12.5, 350, fp8=2.0),
        _gpu("L4", 24, 121.0, 30.3, 300, 12, 3, 72, fp8=2.0),
        _gpu("A10G", 24, 70.0, 35.0, 600, 12, 6, 300),
        _gpu("MI300X", 192, 1307.4, 163.4, 5300, 448, 50, 750, fp8=2.0),
        _gpu("MI250X", 128, 383.0, 47.9, 3277, 100, 25, 560),
    )
}
"""The known devices, by the identifying part of an accelerator's name; of several that match, the longest counts.
Figures are from vendors' data sheets; networks are those of the usual cloud machine.
"""


def find_device(accelerator: str) -> Accelerator | None:
    """Returns the known device whose name occurs, as whole words, in `accelerator`. Returns None if there is none.

    `accelerator` is a node label or the name that the GPU's driver reports.
    """
    matches = [name for name in DEVICES if _pattern(name).search(accelerator)]
    return DEVICES[max(matches, key=len)] if matches else None


def _pattern(name: str) -> re.Pattern[str]:
    words = "[^a-z0-9]+".join(re.split("[ -]", name))
    return re.compile(rf"(?<![a-z0-9]){words}(?![a-z0-9])", re.IGNORECASE)


def device_of(node_type: NodeType) -> Accelerator | None:
    """Returns one GPU of the node type, with the figures that cluster.yaml declares. Returns None if the GPU is
    unknown.

    For a node type without GPUs, returns all of its CPUs as one device.
    """
    if not node_type.resources.get("GPU"):
        return cpu_device(node_type.resources.get("CPU", 1.0), node_type.resources.get("memory", 0.0))
    found = find_device(node_type.labels.get(ACCELERATOR_LABEL, ""))
    if found is None:
        return None
    if node_type.gpu_memory_gb is not None:
        found = replace(found, memory_gb=node_type.gpu_memory_gb)
    if node_type.network_gbps is not None:
        found = replace(found, network=node_type.network_gbps / 8 * GB / node_type.resources["GPU"])
    return found


def gpu_memory_gb(node_type: NodeType) -> float | None:
    """Returns the memory in GB of one GPU of the node type. If the node type does not declare its GPU memory, returns
    the known memory of its accelerator. Returns None if the memory is unknown.
    """
    if not node_type.resources.get("GPU"):
        return None
    if node_type.gpu_memory_gb is not None:
        return node_type.gpu_memory_gb
    found = find_device(node_type.labels.get(ACCELERATOR_LABEL, ""))
    return None if found is None else found.memory_gb


def cpu_device(cores: float, memory_bytes: float = 0.0) -> Accelerator:
    """Returns the CPUs of one rank as a device.

    Collectives on this device do not overlap with compute, because they use the same cores.
    """
    return Accelerator(
        name="CPU",
        memory_gb=memory_bytes / GB,
        bf16_tflops=cores * CPU_CORE_FLOPS / 1e12,
        fp32_tflops=cores * CPU_CORE_FLOPS / 1e12,
        bandwidth=CPU_BANDWIDTH,
        link=CPU_BANDWIDTH / 4,
        network=CPU_NETWORK,
        watts=0.0,
        narrow_width=16.0,
        overlap=0.0,
        launch_s=8e-6,
        link_latency_s=60e-6,
        network_latency_s=150e-6,
        pace=1.0,
        is_cpu=True,
    )


def with_figures(device: Accelerator, figures: Mapping[str, float]) -> Accelerator:
    """Returns the device with the figures that `raytide bench node` measured: matrix products, memory, and the
    all-reduce between members.

    A measured rate of matrix products already includes the device's efficiency for matrix products. This efficiency
    is therefore set to 1.
    """
    changes: dict[str, float] = {}
    if fp32 := figures.get("gemm_float32_flops"):
        changes["fp32_tflops"] = fp32 / 1e12
    if half := figures.get("gemm_bfloat16_flops") or figures.get("gemm_float16_flops"):
        changes["bf16_tflops"] = half / 1e12
    if changes:
        changes["matmul_efficiency"] = 1.0
    if memory := figures.get("memory_bytes_per_s"):
        changes["bandwidth"] = memory
    if reduced := figures.get("all_reduce_bytes_per_s"):
        changes["network"] = reduced
        if device.is_cpu:
            changes["link"] = reduced
    return replace(device, **changes)  # type: ignore[arg-type]
