"""The recipe of a compression: the model, the steps in order, and the quality that the result must keep."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from raytide.actors.quality.suite import HeldOutText, QualitySuite
from raytide.core import bounds
from raytide.core.config import Config
from raytide.core.specs.model import QuantizationOptions

StepKind = Literal["rtn", "gptq", "awq", "smoothquant", "prune", "mask", "distill"]


class RtnStep(QuantizationOptions):
    """Rounds each weight to the nearest quantised value. This step needs no calibration, and holds only one layer in
    memory at a time.
    """

    scheme: Literal["w8a16", "w8a8", "w4a16", "fp8"] = "w8a16"
    """w8a16, w4a16: integer weights, activations as they are. w8a8: activations are rounded to int8 by token, too.
    fp8: weights and activations in E4M3."""

    @model_validator(mode="after")
    def _fits(self) -> RtnStep:
        if self.scheme in ("w8a8", "fp8") and (self.group is not None or not self.symmetric):
            raise ValueError(f"{self.scheme} has one symmetric scale for each output: leave group and symmetric out")
        return self


class CalibratedStep(QuantizationOptions):
    """Quantises with llm-compressor, which runs in a venv of its own. The recipe's text is used for the calibration."""

    scheme: Literal["w8a16", "w8a8", "w4a16"] = "w4a16"
    strength: float = Field(default=0.5, ge=0, le=1)
    """For smoothquant: the share of the activations' outliers that moves into the weights."""


class PruneStep(Config):
    """Removes the least important parts of a model. Their importance is measured by their activations, as in Minitron.
    The result is an ordinary, smaller model.
    """

    ffn: float = Field(default=1.0, gt=0, le=1)
    """The share of the feed-forward neurons that stays."""
    hidden: float = Field(default=1.0, gt=0, le=1)
    """The share of the model's width that stays."""
    kv_groups: float = Field(default=1.0, gt=0, le=1)
    """The share of the KV heads that stays, each with all of its query heads."""
    layers: float = Field(default=1.0, gt=0, le=1)
    """The share of the layers that stays. The layers whose output is most like their input are removed first."""
    multiple: int = Field(default=32, ge=1, le=1024)
    """Widths are rounded to a multiple of this number. It should be a multiple of the quantisation groups and of the
    kernels' panels.
    """

    @model_validator(mode="after")
    def _removes(self) -> PruneStep:
        if self.ffn == self.hidden == self.kv_groups == self.layers == 1.0:
            raise ValueError("give ffn, hidden, kv_groups or layers below 1")
        return self


class MaskStep(Config):
    """Sets weights to zero. This step is for research: no byte and no operation is saved, in raytide or in vLLM."""

    method: Literal["magnitude", "wanda"] = "wanda"
    sparsity: float | None = Field(default=None, gt=0, lt=1)
    """The share of zeros in each output's weights."""
    pattern: Literal["2:4"] | None = None
    """Two zeros among each four neighbours."""

    @model_validator(mode="after")
    def _one(self) -> MaskStep:
        if (self.sparsity is None) == (self.pattern is None):
            raise ValueError("give exactly one of sparsity and pattern")
        return self


class DistillStep(Config):
    """Trains the model on its teacher's predictions, as a run of raytide's trainer. The default teacher is the recipe's
    model.
    """

    train: dict[str, object]
    """Fields of a training run (docs/training.md): dataset, steps, optim, ... Its model, teacher and `out` are set by
    the recipe.
    """
    teacher: dict[str, object] = Field(default_factory=dict)
    """Fields of the run's `distill`: loss, temperature, top_k, cache; `teacher` is the recipe's model by default."""

    @field_validator("train")
    @classmethod
    def _leaves_its_fields(cls, fields: dict[str, object]) -> dict[str, object]:
        taken = sorted({"init_from", "out", "distill", "model", "export", "finetune"} & fields.keys())
        if taken:
            raise ValueError(f"{', '.join(taken)} cannot be set: the recipe gives them")
        return fields


class CompressStep(Config):
    """One step of a recipe. Exactly one of its fields is given."""

    rtn: RtnStep | None = None
    gptq: CalibratedStep | None = None
    awq: CalibratedStep | None = None
    smoothquant: CalibratedStep | None = None
    prune: PruneStep | None = None
    mask: MaskStep | None = None
    distill: DistillStep | None = None

    @model_validator(mode="after")
    def _one(self) -> CompressStep:
        if len(self.given) != 1:
            raise ValueError(f"a step is exactly one of {', '.join(type(self).model_fields)}")
        return self

    @property
    def given(self) -> list[str]:
        return [name for name in type(self).model_fields if getattr(self, name) is not None]

    @property
    def kind(self) -> StepKind:
        name: StepKind = self.given[0]  # type: ignore[assignment]
        return name

    @property
    def quantizes(self) -> bool:
        return self.kind in ("rtn", "gptq", "awq", "smoothquant")

    @property
    def reads_text(self) -> bool:
        return self.kind in ("gptq", "awq", "smoothquant", "prune") or (
            self.mask is not None and self.mask.method == "wanda"
        )


class CompressRecipe(Config):
    """The content of RECIPE.yaml for `raytide compress RECIPE.yaml`."""

    name: str = Field(default="compress", min_length=1, max_length=100)
    model: bounds.Location = Field(min_length=1)
    """A Hugging Face directory, or a run that exported one."""
    out: bounds.Location = Field(min_length=1)
    """The folder of the result, `out`/model, and of each step before it, `out`/steps."""
    steps: tuple[CompressStep, ...] = Field(min_length=1, max_length=16)
    calibration: HeldOutText | None = None
    """The text on which steps measure activations; 512 samples of the model's own kind of text are plenty."""
    quality: QualitySuite | None = None
    """The evaluation of the result; its parent is the recipe's model. A gate that is not passed fails the recipe."""
    speed: bool = False
    """Measure the decoding of parent and result by the native engine, in one run."""
    llm_compressor: bounds.Location = ""
    """The Python of a venv that has llm-compressor; RAYTIDE_LLM_COMPRESSOR by default."""

    @model_validator(mode="after")
    def _fits_together(self) -> CompressRecipe:
        for number, step in enumerate(self.steps, start=1):
            if step.reads_text and self.calibration is None:
                raise ValueError(f"step {number}, {step.kind}, needs calibration: text whose activations it looks at")
            if step.quantizes and number < len(self.steps):
                raise ValueError(f"step {number}, {step.kind}, must be the last: later steps need plain weights")
        if self.quality is not None:
            if self.quality.parent:
                raise ValueError("quality.parent is the recipe's model: leave it out")
            held_out = {corpus.path for corpus in self.quality.corpora.values()}
            if self.calibration is not None and self.calibration.path in held_out:
                raise ValueError("calibration must not be a corpus of quality: it would flatter the result")
        return self
