"""Validates that a model can be trained in a layout. Rejects combinations for which torch would silently compute wrong
results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from raytide.actors.models.architecture import Architecture
from raytide.core.errors import ConfigError
from raytide.core.specs.parallelism import LOOPED, SPLIT_BACKWARD, Parallelism
from raytide.core.specs.train import MemorySpec, TrainSpec


def validate(layout: Parallelism, arch: Architecture, spec: TrainSpec) -> None:
    """Raises ConfigError for the first problem of the layout. The error has a hint."""
    for problem, hint in (*_tensor(layout, arch), *_sequence(layout, spec), *_pipeline(layout, arch, spec)):
        raise ConfigError(f"{spec.name}: {problem}.", hint=hint)


def _tensor(layout: Parallelism, arch: Architecture) -> Iterator[tuple[str, str]]:
    ranks, kv_heads = layout.tensor, arch.num_kv_heads
    if ranks == 1:
        return
    for count, what in ((arch.num_heads, "attention heads"), *_widths(arch)):
        if count % ranks:
            yield f"layout.tensor {ranks} does not divide the model's {count} {what}", _divisors(count)
    if kv_heads % ranks and ranks % kv_heads:
        yield (
            f"layout.tensor {ranks} neither divides the model's {kv_heads} KV heads nor is a multiple of them",
            _divisors(kv_heads),
        )


def _widths(arch: Architecture) -> Iterator[tuple[int, str]]:
    if not all(layer.sparse for layer in arch.layers):
        yield arch.ffn_size, "feed-forward units"
    if arch.experts is not None:
        yield arch.experts.ffn_size, "feed-forward units of each expert"


def _sequence(layout: Parallelism, spec: TrainSpec) -> Iterator[tuple[str, str]]:
    """Yields a problem unless seq_len divides into two pieces per context rank, and each piece over tensor ranks."""
    pieces = layout.tensor if layout.context == 1 else math.lcm(2 * layout.context, layout.context * layout.tensor)
    if spec.seq_len % pieces:
        yield (
            f"seq_len {spec.seq_len} does not divide into {pieces} pieces of the tensor and context axes",
            f"Set seq_len to a multiple of {pieces}.",
        )


def _pipeline(layout: Parallelism, arch: Architecture, spec: TrainSpec) -> Iterator[tuple[str, str]]:
    if layout.stages is not None and layout.schedule not in LOOPED:
        yield (
            f"layout.stages is for the schedules {', '.join(sorted(LOOPED))}; {layout.schedule} has a fixed number",
            "Leave layout.stages out.",
        )
    if layout.pipeline == 1:
        if layout.schedule != "1f1b":
            yield f"layout.schedule {layout.schedule} needs layout.pipeline above 1", "Leave layout.schedule out."
        return
    if arch.num_layers < layout.total_stages:
        yield (
            f"{layout.total_stages} pipeline stages have only {arch.num_layers} layers",
            "Lower layout.pipeline or layout.stages; V-shaped schedules have two stages on each rank.",
        )
    if layout.zero == 2:
        yield (
            "layout.zero 2 with a pipeline: its schedules reduce gradients once a step, as zero 1 does",
            "Set layout.zero to 1 or 3.",
        )
    if layout.schedule in SPLIT_BACKWARD and spec.eval is not None:
        yield (
            f"eval with layout.schedule {layout.schedule}, which torch cannot run forward only",
            "Choose 1f1b or interleaved_1f1b, or leave eval out.",
        )
    yield from _memory(layout, arch, spec.memory)
    needed, rows = layout.min_microbatches, math.ceil(spec.global_batch / (layout.replicate * (layout.shard or 1)))
    if rows < needed:
        yield (
            f"global_batch {spec.global_batch} gives a pipeline {rows} sequences for {needed} microbatches at least",
            "Raise global_batch or lower layout.pipeline.",
        )


def _memory(layout: Parallelism, arch: Architecture, memory: MemorySpec) -> Iterator[tuple[str, str]]:
    """Yields problems of memory options that do not work in a pipeline."""
    split = f"layout.schedule {layout.schedule} runs a layer's backward in two halves"
    if layout.schedule in SPLIT_BACKWARD and memory.checkpointing == "selective":
        yield f"{split}, and selective checkpointing allows one", 'Set memory.checkpointing to "full" or "none".'
    if layout.schedule in SPLIT_BACKWARD and memory.compile:
        yield f"{split}, and a compiled one is a single piece", "Leave memory.compile out, or choose 1f1b."
    if memory.compression != "none" and arch.tied_embeddings:
        yield (
            "memory.compression would round a tied embedding's gradient differently in the first and the last stage",
            "Leave memory.compression out, or untie the embeddings.",
        )


def _divisors(count: int) -> str:
    return f"Choose from {', '.join(str(ranks) for ranks in range(1, min(count, 64) + 1) if count % ranks == 0)}."
