"""The specification of a training run: model, data order, optimizer, memory, guards and gang. Does not import torch.

The data order does not depend on the gang: a step has `global_batch` sequences with any number of ranks."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import ConfigDict, Field, model_validator

from raytide.core import bounds
from raytide.core.config import Config
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.specs.mixture import AugmentSpec, HeldOutSpec, MixtureSpec, Packing, StreamSpec
from raytide.core.specs.model import ChatSpec, DistillSpec, FinetuneSpec, ModelSpec, QatSpec
from raytide.core.specs.optim import OptimSpec
from raytide.core.specs.parallelism import SPLIT_BACKWARD, Parallelism, Sizes

__all__ = ["ExportDtype", "ModelSpec", "OptimSpec", "Precision", "TrainSpec"]

Precision = Literal["bf16", "fp16", "fp32", "fp8"]
ExportDtype = Literal["bf16", "fp16", "fp32"]
Remat = Literal["none", "selective", "full"]
Place = Literal["none", "cpu", "disk"]
Compression = Literal["none", "bf16", "int8", "topk", "powersgd"]
Automatic = Literal["layout", "gang"]
NcclName = Annotated[str, Field(pattern=r"^(NCCL|RCCL|TORCH_NCCL)_[A-Z0-9_]{1,60}$")]


class MemorySpec(Config):
    """Settings that trade memory against speed. Only `compression` changes the result, because it is lossy."""

    checkpointing: Remat = "none"
    """Recomputation of activations in the backward pass, layer by layer: `full` recomputes all of them, with about a
    third more compute; `selective` all but the results of matrix products and attention."""
    activations: Place = "none"
    """The place to which saved activations are offloaded until the backward pass."""
    offload_min_bytes: int = Field(default=1 << 20, ge=1)
    """The least bytes of an activation that is offloaded; smaller ones stay on the device."""
    offload_max_bytes: int = Field(default=64 << 30, ge=1)
    """The most bytes that one rank offloads at once; further activations stay on the device."""
    optimizer: Place = "none"
    """The place of the optimizer state, which is copied to the device one parameter at a time."""
    parameters: Place = "none"
    """The place of weights and gradients, which are read layer by layer; only with an offloaded optimizer."""
    scratch: str | None = None
    """A fast local directory for data that is offloaded to disk; by default the system's temporary directory."""
    loss_chunk: int = Field(default=0, ge=0)
    """The number of tokens whose logits exist at once; 0 computes those of a whole micro-batch."""
    compile: bool = False
    """True to compile each layer with torch.compile."""
    compile_backend: Literal["inductor", "aot_eager"] = "inductor"
    """The backend of torch.compile. `aot_eager` runs the captured graph operator by operator: for tests, and to
    separate errors of capture from those of code generation."""
    compression: Compression = "none"
    """Compression of the exchange between replicas. All kinds but bf16 carry their error to the next exchange."""
    powersgd_rank: int = Field(default=4, ge=1)
    topk_ratio: float = Field(default=0.01, gt=0, le=1)
    """The share of the numbers that `topk` sends: those of the largest magnitude."""

    @model_validator(mode="after")
    def _one_way_for_activations(self) -> MemorySpec:
        if self.checkpointing == "selective" and self.activations != "none":
            raise ValueError("selective checkpointing cannot be combined with offloaded activations: use full or none")
        return self

    @model_validator(mode="after")
    def _optimizer_first(self) -> MemorySpec:
        if self.parameters != "none" and self.optimizer == "none":
            raise ValueError("parameters are offloaded only with the optimizer state, which is larger: set optimizer")
        return self


class MlflowSpec(Config):
    """An MLflow server that receives the run's metrics. `metrics.jsonl` is always written as well.

    The operator may set a bearer token in RAYTIDE_MLFLOW_TOKEN. The token is sent only to the server of
    RAYTIDE_MLFLOW_URI."""

    tracking_uri: str = Field(pattern="^https?://")
    """The address of an MLflow server."""
    experiment: str = Field(default="raytide", min_length=1)


class ProfileSpec(Config):
    """Runs torch's profiler from step `from` to step `to`, both included. Steps are counted from 1."""

    what: Literal["operators", "memory", "nvtx"] = "operators"
    """The kind of profile. `operators` writes a trace and a table of operators. On a GPU, `memory` writes a snapshot of
    every allocation with its stack, for pytorch.org/memory_viz, and `nvtx` marks ranges of operators for Nsight
    Systems, without a file."""

    model_config = ConfigDict(populate_by_name=True)

    first: int = Field(alias="from", ge=1)
    last: int = Field(alias="to", ge=1)

    @model_validator(mode="after")
    def _in_order(self) -> ProfileSpec:
        if self.last < self.first:
            raise ValueError(f"to ({self.last}) must not be before from ({self.first})")
        return self


class GuardSpec(Config):
    """The reaction to a batch whose loss is not finite, or far above the losses before it.

    `skip` keeps weights, optimizer and learning rate unchanged and continues with the next batch."""

    nan: Literal["stop", "skip"] = "stop"
    """The reaction to a loss or gradient norm that is not finite."""
    spike: Literal["stop", "skip", "ignore"] = "ignore"
    """The reaction to a loss above median + max(sigmas * deviation, rise) of the last `window` losses trained on."""
    sigmas: float = Field(default=8.0, gt=0)
    """The factor of the deviation: 1.4826 times the median absolute deviation, a normal distribution's sigma."""
    rise: float = Field(default=0.5, ge=0)
    """The least rise in nats that counts as a spike, because a flat curve has hardly any deviation."""
    window: int = Field(default=64, ge=8, le=128)
    """The number of earlier losses with which a loss is compared. Until there are as many, no spike is detected."""
    max_skips: int = Field(default=5, ge=1)
    """The most consecutive batches that are skipped; one more stops the run."""


class TrainSpec(Config):
    """The specification of one training run. The specification determines the losses, so a resumed run repeats the same
    losses."""

    name: str = Field(default="train", min_length=1, max_length=100)
    team: str = "default"
    dataset: str | MixtureSpec | None = None
    """A token dataset (a directory or an fsspec URL), or a mixture of several."""
    chat: ChatSpec | None = None
    """Conversations to train on, in place of a dataset."""
    out: str
    """A directory that every member reaches, or an fsspec URL (`s3://bucket/run`), for metrics, the exported model and,
    by default, checkpoints."""
    checkpoint_dir: str | None = None
    """A directory or an fsspec URL (`s3://bucket/run`) for checkpoints; `out`/checkpoints by default."""
    model: ModelSpec = ModelSpec()
    init_from: str | None = None
    """A Hugging Face directory, or the `out` of a run that exported one, for config, weights and tokenizer. A URL of an
    object store is copied to each node once."""
    other_tokenizer: bool = False
    """True to allow a dataset with another tokenizer than init_from's; the dataset's tokenizer is then exported."""
    finetune: FinetuneSpec | None = None
    """The part of init_from's model to train; by default all of it."""
    distill: DistillSpec | None = None
    """If set, the run trains on a teacher's predictions in place of the data's own tokens."""
    qat: QatSpec | None = None
    """If set, the run trains for quantised weights."""
    optim: OptimSpec = OptimSpec()
    layout: Parallelism = Parallelism()
    """The mesh axes. With `auto`, the planner chooses them, the micro-batch and checkpointing at submission."""
    auto: tuple[Automatic, ...] = Field(default=(), max_length=2)
    """The fields that the planner chooses: those that a file writes as `auto`. Empty once the job is submitted."""
    steps: int = Field(ge=1)
    global_batch: int = Field(default=32, ge=1)
    """The number of sequences in a step, summed over all ranks."""
    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] = 8
    """The number of sequences that a rank computes at once; "auto" starts with the rank's whole share of a step. Either
    is halved when memory runs out; the global batch stays the same."""
    seq_len: int = Field(default=256, ge=2)
    packing: Packing = "chop"
    """`chop` cuts one stream of documents into sequences; `best_fit` puts whole documents into each and pads it."""
    document_masks: bool | None = None
    """True if tokens attend only to their own document, whose positions start at 0; by default with `best_fit`."""
    augment: AugmentSpec | None = None
    """Changes to the samples as they are read."""
    stream: StreamSpec | None = None
    """If set, remote shards are read as they are needed, in place of a copy of the whole dataset on each machine."""
    eval: HeldOutSpec | None = None
    """If set, the run is evaluated on held-out data."""
    precision: Precision = "fp32"
    """The dtype of computation; weights, gradient sums and optimizer state are always fp32. fp8 is bf16 with the
    layers' matrix products in FP8."""
    memory: MemorySpec = MemorySpec()
    seed: int = Field(default=0, ge=0, lt=2**63)
    checkpoint_every: int = Field(default=100, ge=1)
    """The number of steps between checkpoints. The last step is always saved."""
    keep_checkpoints: int = Field(default=2, ge=1)
    snapshot_every: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """The number of steps between copies of the state in peers' memory, from which a gang recovers a lost member.
    `auto` chooses the least number that costs at most a hundredth of the time; 0 makes none."""
    replica_check_every: int = Field(default=100, ge=0)
    """The number of steps between comparisons of the replicas' weights; 0 makes none. If layout.replicate is above 1, a
    comparison also precedes each checkpoint. A difference ends the run."""
    log_every: int = Field(default=1, ge=1)
    export: bool = True
    """True to write a Hugging Face directory to `out`/model at the end, and any adapters also to `out`/adapter."""
    export_dtype: ExportDtype | None = None
    """The dtype of the exported weights; by default that of `precision`."""
    export_shard_gb: float = Field(default=5.0, gt=0)
    """The size of the largest weight file of an export, in GB; a tensor is never split."""
    record_samples: bool = False
    """True if every rank writes the sample ids of each step, which proves that a resize kept the data order."""
    guard: GuardSpec = GuardSpec()
    profile: ProfileSpec | None = None
    mlflow: MlflowSpec | None = None
    pip: bounds.Requirements = ()
    """Packages that the ranks need in addition to raytide's. Each node installs them with its own pip configuration."""
    image: bounds.Image | None = None
    """The container image that the ranks run in, with the nodes' Python, Ray and raytide."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """The peak TFLOP/s of one device at this precision, for the MFU; needed unless the device is a known GPU."""
    nccl: dict[NcclName, Annotated[str, Field(max_length=200)]] = Field(default={}, max_length=50)
    """Settings of NCCL or RCCL by the names of their environment variables, the same on all ranks:
    `{NCCL_SOCKET_IFNAME: eth1, NCCL_IB_HCA: mlx5}`. Not for workers of Ray Train, which joins them itself."""
    collective_timeout_s: float = Field(default=20.0, gt=0)
    """The seconds for which a rank may keep the others waiting before it counts as hung."""
    stall_timeout_s: float = Field(default=1800.0, gt=0)
    """The seconds that a rank may spend in one step, load or export before the run fails."""
    gang: GangSpec = GangSpec(shapes=(Shape(resources={"CPU": 1.0}),))
    """The run's members. With `auto`, the planner chooses node types and numbers of nodes at submission."""
    spares: int = Field(default=0, ge=0, le=1024)
    """The number of idle members, in addition to the gang's, which replace a lost member at once."""

    @model_validator(mode="before")
    @classmethod
    def _automatic(cls, fields: object) -> object:
        """Moves the names of fields that have the value `auto` to the field `auto`."""
        if not isinstance(fields, Mapping):
            return fields
        named = [name for name in get_args(Automatic) if fields.get(name) == "auto"]
        rest = {key: value for key, value in fields.items() if key not in named}
        return {**rest, "auto": named} if named else rest

    @model_validator(mode="after")
    def _source(self) -> TrainSpec:
        bounds.check_environment(self.pip, self.image)
        if (self.dataset is None) == (self.chat is None):
            raise ValueError("give either dataset or chat")
        if self.init_from is not None and (self.model.numbers or isinstance(self.model.config, str)):
            raise ValueError("init_from brings its own model config; model.config may only override fields of it")
        if self.finetune is not None and self.init_from is None:
            raise ValueError("finetune needs init_from, the model that it adapts")
        if self.chat is not None and self.chat.tokenizer is None and self.init_from is None:
            raise ValueError("chat.tokenizer is required without init_from")
        return self

    @model_validator(mode="after")
    def _data(self) -> TrainSpec:
        held_out = self.eval is not None and self.eval.fraction is not None
        for wrong, why in (
            (self.chat is not None and self.packing != "chop", "packing best_fit needs a dataset, not chat"),
            (self.chat is not None and self.document_masks, "document_masks needs a dataset, not chat"),
            (self.chat is not None and self.augment is not None, "augment needs a dataset, not chat"),
            (self.chat is not None and self.eval is not None, "eval needs a dataset, not chat"),
            (self.chat is not None and self.stream is not None, "stream needs a dataset, not chat"),
            (
                held_out and self.packing != "best_fit",
                "eval.fraction needs packing best_fit: chopped sequences share documents. Or give eval.dataset",
            ),
        ):
            if wrong:
                raise ValueError(why)
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
            (tensor and self.memory.compile, "memory.compile cannot be combined with layout.tensor above 1"),
            (tensor and self.precision == "fp8", "precision fp8 cannot be combined with layout.tensor above 1"),
            (self.finetune is not None and self.precision == "fp8", "precision fp8 cannot be combined with finetune"),
            (
                self.distill is not None and (tensor or self.layout.pipeline > 1 or self.layout.context > 1),
                "distill needs all logits of a sequence on one rank: use only layout.replicate and layout.shard",
            ),
            (
                self.distill is not None and self.memory.loss_chunk > 0,
                "distill cannot be combined with memory.loss_chunk; distill.top_k bounds what is kept",
            ),
            (
                self.memory.parameters != "none"
                and (tensor or self.layout.pipeline > 1 or self.layout.zero != 3 or self.replicas_reduce_themselves),
                "memory.parameters needs layout.zero 3, and no tensor, pipeline, compression or optim.outer",
            ),
            (
                tensor and self.memory.loss_chunk,
                "memory.loss_chunk cannot be combined with layout.tensor above 1",
            ),
            (
                self.memory.compression != "none" and self.layout.replicate == 1,
                "memory.compression needs layout.replicate above 1: it compresses what replicas exchange",
            ),
            (
                self.optim.outer is not None and self.layout.replicate == 1,
                "optim.outer needs layout.replicate above 1: it is for replicas that train apart",
            ),
        ):
            if wrong:
                raise ValueError(why)
        return self

    @model_validator(mode="after")
    def _quantises_alone(self) -> TrainSpec:
        if self.qat is None:
            return self
        others = {
            "layout.tensor above 1": self.layout.tensor > 1,
            f"layout.schedule {self.layout.schedule}": self.layout.schedule in SPLIT_BACKWARD,
            "precision fp8": self.precision == "fp8",
            "finetune": self.finetune is not None,
            f"export_dtype {self.export_dtype} of precision {self.precision}": self.precision != "fp32"
            and self.export_dtype not in (None, self.precision),
        }
        for name, is_set in others.items():
            if is_set:
                raise ValueError(f"qat cannot be combined with {name}")
        if self.qat.start_step >= self.steps:
            raise ValueError(f"qat.start_step {self.qat.start_step} must be below steps {self.steps}")
        return self

    @property
    def asks(self) -> GangSpec:
        """The gang that the job requests: the gang of this spec plus spares, which are not needed to start."""
        if not self.spares:
            return self.gang
        shapes = (
            shape.model_copy(update={"members": shape.members + self.spares, "min_members": shape.at_least})
            for shape in self.gang.shapes
        )
        return self.gang.model_copy(update={"shapes": tuple(shapes)})

    @property
    def datasets(self) -> tuple[str, ...]:
        """The token datasets on which the run trains. The result is empty for a run on conversations."""
        if isinstance(self.dataset, MixtureSpec):
            return tuple(source.dataset for source in self.dataset.sources)
        return () if self.dataset is None else (self.dataset,)

    @property
    def masks_documents(self) -> bool:
        return self.packing == "best_fit" if self.document_masks is None else self.document_masks

    @property
    def checkpoint_url(self) -> str:
        return self.checkpoint_dir or f"{self.out.rstrip('/')}/checkpoints"

    @property
    def places(self) -> tuple[str, ...]:
        """The folders to which the run writes. No other run may write to them at the same time."""
        return (self.out,) if self.checkpoint_dir is None else (self.out, self.checkpoint_dir)

    @property
    def takes_snapshots(self) -> bool:
        """True if `snapshot_every` is not 0 and the parameters are not on disk: peers keep copies of the state then."""
        return bool(self.snapshot_every) and self.memory.parameters != "disk"

    @property
    def replicas_reduce_themselves(self) -> bool:
        """Returns whether replicas exchange something other than the full gradients of each step."""
        return self.memory.compression != "none" or self.optim.outer is not None

    def is_due(self, every: int, step: int) -> bool:
        """Returns whether an action that is due every `every` steps (0: never) takes place after `step`.

        With an OuterSpec, the action waits for the replicas' next meeting. The end of the last step is a meeting, too.
        """
        if self.optim.outer is None or not every:
            return bool(every) and step % every == 0
        together = self.optim.outer.every
        return step == self.steps or (step % together == 0 and step // every > (step - together) // every)

    def are_replicas_equal(self, step: int) -> bool:
        """Returns whether all replicas have equal weights after `step`. With an OuterSpec, the weights are equal only
        after a meeting, which synchronises the replicas, and after the last step."""
        return self.optim.outer is None or step % self.optim.outer.every == 0 or step == self.steps

    def first_micro_batch(self, sizes: Sizes) -> int:
        """Returns the first micro-batch size, in sequences. `auto` makes one micro-batch for each pipeline rank."""
        if self.micro_batch != "auto":
            return self.micro_batch
        return max(1, math.ceil(self.global_batch / sizes.data) // sizes.pipeline)

    def digest(self) -> str:
        """Returns a hash of the fields that determine the samples. A run resumes only from checkpoints that have the
        same hash.

        Packing, mixtures and held-out documents are covered by the dataset's own digest."""
        keys = {"seed", "global_batch", "seq_len"}
        body = self.model_dump(mode="json", include=keys)
        if self.masks_documents:
            body["document_masks"] = True
        if self.augment is not None:
            body["augment"] = self.augment.model_dump(mode="json")
        if self.stream is not None and self.stream.block:
            body["shuffle"] = [self.stream.block, self.stream.window]
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
