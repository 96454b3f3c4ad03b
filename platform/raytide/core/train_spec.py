"""What a training run is: the model, the data order, the optimiser and the gang. No torch: the CLI reads it.

Data order belongs to the spec, never to the gang: `global_batch` sequences make a step, whatever the number of ranks.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal

from pydantic import Field, model_validator

from raytide.core.config import Config
from raytide.core.gang import GangSpec, Shape
from raytide.core.layout import Layout

Precision = Literal["bf16", "fp32"]


class ModelSpec(Config):
    """A Llama-style decoder."""

    vocab_size: int | None = Field(default=None, ge=2)
    """The dataset's own when left out."""
    dim: int = Field(default=256, ge=2)
    layers: int = Field(default=6, ge=1)
    heads: int = Field(default=8, ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    """As many as heads when left out; fewer is grouped-query attention."""
    ffn_dim: int | None = Field(default=None, ge=1)
    """8/3 of dim, rounded up to a multiple of 64, when left out."""
    max_seq_len: int = Field(default=1024, ge=1)
    rope_theta: float = Field(default=10000.0, gt=0)
    norm_eps: float = Field(default=1e-5, gt=0)
    tie_embeddings: bool = True

    @model_validator(mode="after")
    def _divides(self) -> ModelSpec:
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(f"dim {self.dim} over heads {self.heads} must give an even head size")
        if self.heads % self.n_kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.n_kv_heads}")
        return self

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def n_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def n_ffn(self) -> int:
        return self.ffn_dim if self.ffn_dim is not None else -(-self.dim * 8 // 3 // 64) * 64


class OptimSpec(Config):
    """AdamW; the rate warms up linearly, then falls along a cosine to `lr * min_lr_ratio` at the last step."""

    lr: float = Field(default=3e-4, gt=0)
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    warmup_steps: int = Field(default=10, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    """On matrices; norms have none."""
    clip: float = Field(default=1.0, gt=0)
    """The largest global gradient norm."""


class TrainSpec(Config):
    """One run. Everything that decides its losses is here, so a resume with the same spec repeats them."""

    name: str = Field(default="train", min_length=1, max_length=100)
    team: str = "default"
    dataset: str
    """A token dataset: a directory or an fsspec URL."""
    out: str
    """A directory that every member reaches: checkpoints, metrics and the exported model."""
    model: ModelSpec = ModelSpec()
    optim: OptimSpec = OptimSpec()
    layout: Layout = Layout()
    steps: int = Field(ge=1)
    global_batch: int = Field(default=32, ge=1)
    """Sequences in a step, over all ranks."""
    micro_batch: int = Field(default=8, ge=1)
    """Sequences that a rank holds at once; a rank's share of a step is cut into so many."""
    seq_len: int = Field(default=256, ge=2)
    precision: Precision = "fp32"
    seed: int = Field(default=0, ge=0, lt=2**63)
    checkpoint_every: int = Field(default=100, ge=1)
    """Steps. The last step is always saved."""
    keep_checkpoints: int = Field(default=2, ge=1)
    log_every: int = Field(default=1, ge=1)
    export: bool = True
    """Write a Hugging Face directory to `out`/model at the end."""
    record_samples: bool = False
    """Every rank writes the sample ids of each step: the audit that a resize changed nothing."""
    collective_timeout_s: float = Field(default=20.0, gt=0)
    """A rank that keeps the others waiting for longer is taken for hung."""
    stall_timeout_s: float = Field(default=1800.0, gt=0)
    """A run of which a rank is at one step, load or export for longer fails."""
    gang: GangSpec = GangSpec(shapes=(Shape(resources={"CPU": 1.0}),))

    @model_validator(mode="after")
    def _lengths(self) -> TrainSpec:
        if self.seq_len > self.model.max_seq_len:
            raise ValueError(f"seq_len {self.seq_len} is above model.max_seq_len {self.model.max_seq_len}")
        return self

    def digest(self) -> str:
        """Of what a checkpoint cannot be resumed without: the model's form and the data order."""
        keys = {"model", "seed", "global_batch", "seq_len"}
        return hashlib.sha256(json.dumps(self.model_dump(include=keys), sort_keys=True).encode()).hexdigest()
