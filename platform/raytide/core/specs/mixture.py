"""The specifications of training data beyond a single dataset: mixtures, augmentation, streaming and held-out
evaluation.

All random choices depend on (seed, step) only. A resume or a resize of the gang thus changes no sample.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from raytide.core.config import Config

Packing = Literal["chop", "best_fit"]
MOST_SOURCES = 64
MOST_PHASES = 256
MOST_WEIGHT = 1e15

Weights = dict[str, float]
"""The weight of each source, by its name."""


class MixtureSource(Config):
    """One token dataset of a mixture."""

    dataset: str = Field(min_length=1)
    """A token dataset: a directory or an fsspec URL."""
    name: str = Field(default="", max_length=200)
    """The name that phases use; the last part of the dataset's path by default."""
    weight: float | None = Field(default=None, ge=0, le=MOST_WEIGHT)
    """The share of the trained tokens, relative to the other sources; by default, the source's number of tokens."""
    epochs: float | None = Field(default=None, gt=0, le=1e6)
    """The number of passes, in place of a weight; the weight is then `epochs` times the source's number of tokens."""
    max_epochs: float | None = Field(default=None, gt=0, le=1e6)
    """The most passes over this source in the whole run. The excess of its share goes to the other sources."""

    @property
    def label(self) -> str:
        return self.name or self.dataset.rstrip("/").rpartition("/")[2]

    @model_validator(mode="after")
    def _one_share(self) -> MixtureSource:
        if self.weight is not None and self.epochs is not None:
            raise ValueError(f"source {self.label}: give weight or epochs, not both")
        return self


class MixturePhase(Config):
    """Weights that replace the sources' own weights from `from_step` until the next phase begins. A source that is not
    in `weights` has weight 0.
    """

    from_step: int = Field(ge=1)
    """The first step with these weights; steps are counted from 0."""
    weights: Weights = Field(min_length=1, max_length=MOST_SOURCES)

    @model_validator(mode="after")
    def _positive(self) -> MixturePhase:
        _check_weights(self.weights, f"the phase from step {self.from_step}")
        return self


class MixtureSpec(Config):
    """A mixture of weighted sources. Weights are shares of the trained tokens. Each step follows the weights as closely
    as whole sequences allow."""

    sources: tuple[MixtureSource, ...] = Field(min_length=1, max_length=MOST_SOURCES)
    temperature: float = Field(default=1.0, gt=0, le=1e6)
    """The temperature T: weights are raised to the power 1 / T. Above 1, small sources count for more, as is usual for
    many languages.
    """
    max_epochs: float | None = Field(default=None, gt=0, le=1e6)
    """The most passes over any source that has no limit of its own (UniMax, Chung et al. 2023)."""
    phases: tuple[MixturePhase, ...] = Field(default=(), max_length=MOST_PHASES)
    """A curriculum: at later steps, the weights of a phase replace the sources' own."""

    @model_validator(mode="after")
    def _fits(self) -> MixtureSpec:
        names = [source.label for source in self.sources]
        if len(set(names)) < len(names):
            raise ValueError("two sources have the same name: give each a name of its own")
        given = [source.weight for source in self.sources if source.weight is not None]
        if 0 < len(given) < len(self.sources):
            raise ValueError("give all sources a weight, or none: a source without one counts by its number of tokens")
        if given and not any(given):
            raise ValueError("all weights are zero")
        starts = [phase.from_step for phase in self.phases]
        if sorted(set(starts)) != starts:
            raise ValueError("phases must be in the order of from_step, each once")
        for phase in self.phases:
            if unknown := sorted(set(phase.weights) - set(names)):
                raise ValueError(
                    f"the phase from step {phase.from_step} names the source {unknown[0]!r}, which is none of "
                    f"{', '.join(names[:10])}"
                )
        return self


class FillInTheMiddle(Config):
    """Moves the middle of a document behind its end (Bavarian et al. 2022). Three sentinel tokens of the tokenizer mark
    the parts."""

    rate: float = Field(default=0.5, gt=0, le=1)
    """The share of documents that are rearranged."""
    spm_rate: float = Field(default=0.5, ge=0, le=1)
    """The share of the rearranged documents in the order suffix, prefix, middle; the others have the order prefix,
    suffix, middle.
    """
    prefix: int = Field(ge=0, lt=1 << 32)
    middle: int = Field(ge=0, lt=1 << 32)
    suffix: int = Field(ge=0, lt=1 << 32)
    """`prefix`, `middle` and `suffix` are the ids of the sentinel tokens."""

    @model_validator(mode="after")
    def _distinct(self) -> FillInTheMiddle:
        if len({self.prefix, self.middle, self.suffix}) < 3:
            raise ValueError("the sentinels prefix, middle and suffix must be three different tokens")
        return self


class MaskedInputs(Config):
    """Replaces some input tokens by the token `token`. The targets stay unchanged, and ends of documents are never
    replaced."""

    rate: float = Field(gt=0, lt=1)
    """The expected share of the inputs that are replaced."""
    token: int = Field(ge=0, lt=1 << 32)
    span: int = Field(default=1, ge=1, le=1 << 16)
    """The number of consecutive tokens replaced together; 1 masks single tokens."""

    @property
    def start_rate(self) -> float:
        """Returns the share s of positions at which a masked span starts. Spans may overlap, and therefore s is
        computed from `1 - (1 - s) ** span = rate`.
        """
        return 1.0 - float((1.0 - self.rate) ** (1.0 / self.span))


class AugmentSpec(Config):
    """Changes samples as they are read. The changes depend on (seed, step, sample id) alone."""

    fill_in_the_middle: FillInTheMiddle | None = None
    masked_inputs: MaskedInputs | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Returns the special token ids that the augmentation puts into samples."""
        fim, masked = self.fill_in_the_middle, self.masked_inputs
        sentinels = () if fim is None else (fim.prefix, fim.middle, fim.suffix)
        return sentinels if masked is None else (*sentinels, masked.token)


class HeldOutSpec(Config):
    """Held-out evaluation: the loss and perplexity of sequences that are never trained on."""

    dataset: str | None = None
    """A separate token dataset for evaluation, made with the same tokenizer."""
    fraction: float | None = Field(default=None, gt=0, le=0.5)
    """The share of the training documents to hold out, in place of a dataset.

    Documents are chosen by a hash of their tokens, so that copies and later builds make the same choice.
    """
    every: int = Field(default=100, ge=1)
    """Steps between evaluations. The last step is always evaluated."""
    batches: int = Field(default=8, ge=1, le=1 << 20)
    """The most evaluation batches, of `global_batch` sequences each; fewer if there are not enough sequences."""

    patience: int | None = Field(default=None, ge=1)
    """The number of consecutive evaluations without an improvement on the best loss after which the run ends; None: it
    never ends early.
    """
    min_delta: float = Field(default=0.0, ge=0)
    """The least fall of the loss, in nats, that counts as an improvement."""

    @model_validator(mode="after")
    def _one_source(self) -> HeldOutSpec:
        if (self.dataset is None) == (self.fraction is None):
            raise ValueError("give eval.dataset or eval.fraction")
        return self


class StreamSpec(Config):
    """Options for streaming: each shard of a remote dataset is read when a step needs it. Without these options, the
    whole dataset is copied before the first step.
    """

    cache_gb: float = Field(default=50.0, gt=0)
    """The most local disk in GB, for all runs of this user on a machine. The least recently used shards are removed
    first.
    """
    ahead: int = Field(default=4, ge=1, le=64)
    """The number of steps whose shards are fetched ahead."""
    block: int = Field(default=0, ge=0, le=1 << 40)
    """The number of sequences in a block. Blocks are shuffled as a whole, and sequences among only `window` blocks at a
    time, so that a step reads few shards. 0 shuffles all sequences together.
    """
    window: int = Field(default=16, ge=1, le=1 << 20)


def _check_weights(weights: Weights, what: str) -> None:
    if any(not 0 <= weight <= MOST_WEIGHT for weight in weights.values()):
        raise ValueError(f"{what}: a weight lies between 0 and {MOST_WEIGHT:g}")
    if not any(weights.values()):
        raise ValueError(f"all weights of {what} are zero")
