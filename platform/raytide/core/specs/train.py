"""What a training run is: the model, the data order, the optimiser and the gang. No torch: the CLI reads it.

Data order belongs to the spec, never to the gang: `global_batch` sequences make a step, whatever the number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from raytide.core.config import Config
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.specs.memory_spec import MemorySpec
from raytide.core.specs.model import ChatSpec, FinetuneSpec, ModelSpec
from raytide.core.specs.optim_spec import OptimSpec
from raytide.core.specs.parallelism import Parallelism, Sizes
from raytide.core.specs.record_spec import GuardSpec, MlflowSpec, ProfileSpec

__all__ = ["ExportDtype", "ModelSpec", "OptimSpec", "Precision", "TrainSpec"]

Precision = Literal["bf16", "fp16", "fp32", "fp8"]
ExportDtype = Literal["bf16", "fp16", "fp32"]


class TrainSpec(Config):
    """One run. Everything that decides its losses is here, so a resume with the same spec repeats them."""

    name: str = Field(default="train", min_length=1, max_length=100)
    team: str = "default"
    dataset: str | None = None
    """A token dataset: a directory or an fsspec URL."""
    chat: ChatSpec | None = None
    """Conversations to train on, instead of a dataset."""
    out: str
    """A directory that every member reaches: metrics, the exported model and, if nothing else is said, checkpoints."""
    checkpoint_dir: str | None = None
    """Where checkpoints go: a directory or an fsspec URL (`s3://bucket/run`); `out`/checkpoints when left out."""
    model: ModelSpec = ModelSpec()
    init_from: str | None = None
    """A Hugging Face directory, or the `out` of a run that exported one: its config, weights and tokenizer."""
    other_tokenizer: bool = False
    """Train although the dataset was made with another tokenizer than that of init_from; the dataset's is exported."""
    finetune: FinetuneSpec | None = None
    """What learns of the model of init_from; all of it when left out."""
    optim: OptimSpec = OptimSpec()
    layout: Parallelism = Parallelism()
    steps: int = Field(ge=1)
    global_batch: int = Field(default=32, ge=1)
    """Sequences in a step, over all ranks."""
    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] = 8
    """Sequences that a rank begins to hold at once; its share of a step is cut into so many. "auto" begins with all of
    the share. Either is halved when memory runs out, at the same global batch."""
    seq_len: int = Field(default=256, ge=2)
    precision: Precision = "fp32"
    """What is computed in; weights, gradient sums and optimiser are fp32 with all of them. fp8 is bf16 with the layers'
    matrix products in FP8."""
    memory: MemorySpec = MemorySpec()
    seed: int = Field(default=0, ge=0, lt=2**63)
    checkpoint_every: int = Field(default=100, ge=1)
    """Steps. The last step is always saved."""
    keep_checkpoints: int = Field(default=2, ge=1)
    snapshot_every: int = Field(default=10, ge=0)
    """Steps between copies of the state in other members' memory, from which a gang that lost one goes on. 0: none."""
    replica_check_every: int = Field(default=100, ge=0)
    """Steps between comparisons of the replicas' weights, which also come before each checkpoint where layout.replicate
    is above 1; a difference ends the run. 0: none."""
    log_every: int = Field(default=1, ge=1)
    export: bool = True
    """Write a Hugging Face directory to `out`/model at the end; with adapters, those alone to `out`/adapter too."""
    export_dtype: ExportDtype | None = None
    """That of `precision` when left out."""
    export_shard_gb: float = Field(default=5.0, gt=0)
    """The largest file of weights that an export writes; a tensor is never split."""
    record_samples: bool = False
    """Every rank writes the sample ids of each step: the audit that a resize changed nothing."""
    guard: GuardSpec = GuardSpec()
    profile: ProfileSpec | None = None
    mlflow: MlflowSpec | None = None
    peak_tflops: float | None = Field(default=None, gt=0)
    """What one device can do at this precision, for the MFU; needed where the device is not a known GPU."""
    collective_timeout_s: float = Field(default=20.0, gt=0)
    """A rank that keeps the others waiting for longer is taken for hung."""
    stall_timeout_s: float = Field(default=1800.0, gt=0)
    """A run of which a rank is at one step, load or export for longer fails."""
    gang: GangSpec = GangSpec(shapes=(Shape(resources={"CPU": 1.0}),))
    spares: int = Field(default=0, ge=0, le=1024)
    """Members kept warm beyond those of the gang: started and idle, seated the moment that another one dies."""

    @model_validator(mode="after")
    def _source(self) -> TrainSpec:
        if (self.dataset is None) == (self.chat is None):
            raise ValueError("give a dataset or chat: one of the two")
        if self.init_from is not None and (self.model.numbers or isinstance(self.model.config, str)):
            raise ValueError("init_from has a config of its own; model.config may only replace fields of it")
        if self.finetune is not None and self.init_from is None:
            raise ValueError("finetune adapts the model of init_from, which is missing")
        if self.chat is not None and self.chat.tokenizer is None and self.init_from is None:
            raise ValueError("chat.tokenizer is missing: there is no init_from to take it from")
        return self

    @model_validator(mode="after")
    def _lengths(self) -> TrainSpec:
        short = self.init_from is None and self.model.config is None
        if short and self.seq_len > self.model.max_seq_len:
            raise ValueError(f"seq_len {self.seq_len} is above model.max_seq_len {self.model.max_seq_len}")
        return self

    @model_validator(mode="after")
    def _work_together(self) -> TrainSpec:
        tensor = self.layout.tensor > 1
        for wrong, why in (
            (tensor and self.memory.compile, "memory.compile fails in the backward pass of a tensor-parallel layer"),
            (tensor and self.precision == "fp8", "precision fp8 has no tensor-parallel products"),
            (self.finetune is not None and self.precision == "fp8", "precision fp8 has no products with adapters"),
            (tensor and self.memory.loss_chunk, "memory.loss_chunk: with layout.tensor the logits are divided already"),
            (
                self.memory.compression != "none" and self.layout.replicate == 1,
                "memory.compression is for what replicas exchange, and layout.replicate is 1",
            ),
        ):
            if wrong:
                raise ValueError(why)
        return self

    @property
    def asks(self) -> GangSpec:
        """What the job asks the platform for: the gang and its spares, none of which is needed to begin."""
        if not self.spares:
            return self.gang
        shapes = (
            shape.model_copy(update={"members": shape.members + self.spares, "min_members": shape.at_least})
            for shape in self.gang.shapes
        )
        return self.gang.model_copy(update={"shapes": tuple(shapes)})

    @property
    def checkpoint_url(self) -> str:
        return self.checkpoint_dir or f"{self.out.rstrip('/')}/checkpoints"

    @property
    def places(self) -> tuple[str, ...]:
        """The folders that it writes to, which no other run may write to meanwhile."""
        return (self.out,) if self.checkpoint_dir is None else (self.out, self.checkpoint_dir)

    def first_micro_batch(self, sizes: Sizes) -> int:
        """What ranks begin with. A pipeline needs a rank's share in as many pieces as it has stages."""
        if self.micro_batch != "auto":
            return self.micro_batch
        return max(1, math.ceil(self.global_batch / sizes.data) // sizes.pipeline)

    def digest(self) -> str:
        """Of what a checkpoint cannot be resumed without, beside the model and the data themselves: the data order."""
        keys = {"seed", "global_batch", "seq_len"}
        return hashlib.sha256(json.dumps(self.model_dump(include=keys), sort_keys=True).encode()).hexdigest()
