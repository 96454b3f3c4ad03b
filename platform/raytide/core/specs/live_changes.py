"""Changes of endpoints that need no new replicas."""

from __future__ import annotations

from pydantic import Field

from raytide.core import bounds
from raytide.core.config import Config
from raytide.core.errors import NotFoundError
from raytide.core.objects.endpoint import MOST_ADAPTERS, AdapterName, ServeSpec


class AdapterChange(Config):
    """`raytide endpoint adapters`: what to load and unload."""

    load: dict[AdapterName, bounds.Location] = Field(default_factory=dict, max_length=MOST_ADAPTERS)
    unload: tuple[AdapterName, ...] = Field(default=(), max_length=MOST_ADAPTERS)

    def applied_to(self, spec: ServeSpec) -> dict[str, str]:
        """Returns the spec's adapters after the change. Raises NotFoundError for one to unload that is not there."""
        for name in self.unload:
            if name not in spec.adapters:
                raise NotFoundError(f"endpoint {spec.name} has no adapter {name}.", hint="List them without options.")
        kept = {name: location for name, location in spec.adapters.items() if name not in self.unload}
        return {**kept, **self.load}

    def __str__(self) -> str:
        return " ".join(["adapters", *(f"+{name}" for name in self.load), *(f"-{name}" for name in self.unload)])


class WeightsChange(Config):
    """`raytide serve NAME --weights`."""

    location: bounds.Location
    """"" for the weights of the spec's model."""
