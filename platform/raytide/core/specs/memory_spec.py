"""What a run trades for memory and speed: recomputation, offload, compression. No torch: the CLI reads it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from raytide.core.config import Config

__all__ = ["Compression", "MemorySpec", "Place", "Remat"]

Remat = Literal["none", "selective", "full"]
Place = Literal["none", "cpu", "disk"]
Compression = Literal["none", "bf16", "int8", "powersgd"]


class MemorySpec(Config):
    """None of these changes what is computed, except for `compression`, which is lossy."""

    checkpointing: Remat = "none"
    """Activations computed again in the backward pass, layer by layer: all of them (full: about a third more compute),
    or all but the results of matrix products and attention (selective)."""
    activations: Place = "none"
    """Where saved activations wait for the backward pass, when not on the device."""
    offload_min_bytes: int = Field(default=1 << 20, ge=1)
    """Smaller activations stay on the device."""
    offload_max_bytes: int = Field(default=64 << 30, ge=1)
    """Of one rank's activations away from the device at once; what is above stays there."""
    optimizer: Place = "none"
    """Where the optimiser's state lives; it visits the device one parameter at a time."""
    scratch: str | None = None
    """The directory of what goes to disk: a local, fast one. The system's temporary one when left out."""
    loss_chunk: int = Field(default=0, ge=0)
    """Tokens whose logits exist at once; 0 is all of a microbatch."""
    compile: bool = False
    """Compile each layer."""
    compile_backend: Literal["inductor", "aot_eager"] = "inductor"
    """aot_eager runs the captured graph op by op: for tests, and to tell capture from code generation."""
    compression: Compression = "none"
    """Of the gradients that replicas exchange; int8 and powersgd carry their error over to the next step."""
    powersgd_rank: int = Field(default=4, ge=1)

    @model_validator(mode="after")
    def _one_way_for_activations(self) -> MemorySpec:
        if self.checkpointing == "selective" and self.activations != "none":
            raise ValueError("what selective checkpointing keeps cannot be offloaded: take full, or none")
        return self
