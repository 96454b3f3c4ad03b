"""The identity of weights: a model directory and a hash of its content."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from raytide.actors.models.content import content_digest
from raytide.core.errors import ConflictError


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """A model directory with its version: a name given by the owner, else the hash of the content."""

    model_dir: Path
    content: str
    version: str

    @classmethod
    def at(cls, model_dir: Path, version: str | None = None) -> WeightsSource:
        content = content_digest(model_dir)
        return cls(model_dir, content, version or content)

    def check_unchanged(self) -> None:
        """Raise ConflictError when the directory now holds other weights."""
        found = content_digest(self.model_dir)
        if found != self.content:
            raise ConflictError(
                f"{self.model_dir} no longer holds the weights {self.version}: their content was {self.content}, "
                f"now it is {found}.",
                hint="Put them back, or load the new ones under a version of their own.",
            )
