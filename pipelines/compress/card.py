"""The card of a compressed model. It states the model's origin, steps, bytes, speed and remaining quality."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from raytide.actors.models.model_config import read_json
from raytide.actors.quality.corpus import corpus_digest
from raytide.actors.quality.evaluate import QualityReport
from raytide.actors.quality.suite import broken_limits
from raytide.core.io.atomic_file import write_json
from raytide.pipelines.compress.recipe import CompressRecipe

CARD = "raytide_card.json"


@dataclass(frozen=True, slots=True)
class StepCard:
    kind: str
    options: Mapping[str, object]
    bytes: int
    """The size of the weights after the step."""


@dataclass(frozen=True, slots=True)
class CompressionCard:
    """The card of a compressed model, stored in the model's directory as `raytide_card.json`."""

    parent: str
    parent_bytes: int
    bytes: int
    steps: tuple[StepCard, ...]
    asked: Mapping[str, object]
    """The quality and speed that the recipe asks for, and the digests of the corpora. A finished card is recognised by
    them as that of this recipe.
    """
    quality: Mapping[str, object] | None = None
    """The report of the suite: corpora, tasks and metrics."""
    speed: Mapping[str, float] | None = None
    """Decoded tokens a second of parent and model, by concurrency."""
    broken: tuple[str, ...] = field(default=())
    """The limits of the quality gate that the model violates."""

    @classmethod
    def of(
        cls,
        recipe: CompressRecipe,
        parent: str,
        parent_bytes: int,
        steps: tuple[StepCard, ...],
        quality: QualityReport | None,
        speed: Mapping[str, float] | None,
    ) -> CompressionCard:
        broken: tuple[str, ...] = ()
        if quality is not None and recipe.quality is not None:
            broken = broken_limits(recipe.quality.gate, quality.metrics())
        return cls(
            parent=parent,
            parent_bytes=parent_bytes,
            bytes=steps[-1].bytes,
            steps=steps,
            asked=_asked(recipe),
            quality=None if quality is None else quality.to_json(),
            speed=speed,
            broken=broken,
        )

    def belongs_to(self, recipe: CompressRecipe) -> bool:
        return dict(self.asked) == _asked(recipe)

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def weight_bytes(folder: Path) -> int:
    """Returns the size in bytes of the weights in a model directory. If the directory has an index, only the files that
    it names count: Mistral's directories have the same weights a second time, in `consolidated.safetensors`.
    """
    index = folder / "model.safetensors.index.json"
    names = set(read_json(index)["weight_map"].values()) if index.exists() else None
    return sum(file.stat().st_size for file in folder.glob("*.safetensors") if names is None or file.name in names)


def write_card(folder: Path, card: CompressionCard) -> None:
    write_json(folder / CARD, card.to_json(), mode=0o644)


def read_card(folder: Path) -> CompressionCard | None:
    """Returns the card in a model directory, or None if there is no readable card."""
    try:
        body = json.loads((folder / CARD).read_text())
        steps = tuple(StepCard(**each) for each in body.pop("steps"))
        return CompressionCard(**{**body, "steps": steps, "broken": tuple(body["broken"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _asked(recipe: CompressRecipe) -> dict[str, object]:
    body: dict[str, object] = json.loads(recipe.model_dump_json(include={"quality", "speed"}))
    corpora = {} if recipe.quality is None else recipe.quality.corpora
    return {**body, "corpora": {name: corpus_digest(corpus) for name, corpus in corpora.items()}}
