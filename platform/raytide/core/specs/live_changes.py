"""Changes of endpoints that need no new replicas."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from raytide.core import bounds
from raytide.core.config import Config
from raytide.core.errors import NotFoundError
from raytide.core.objects.endpoint import METERS, MOST_ADAPTERS, AdapterName, ServeSpec


class AdapterChange(Config):
    """The request of `raytide endpoint adapters`: the adapters to load and the adapters to unload."""

    load: dict[AdapterName, bounds.Location] = Field(default_factory=dict, max_length=MOST_ADAPTERS)
    unload: tuple[AdapterName, ...] = Field(default=(), max_length=MOST_ADAPTERS)

    def applied_to(self, spec: ServeSpec) -> dict[str, str]:
        """Returns the adapters of this spec after the change. Raises NotFoundError if the change unloads an adapter
        that the spec does not have.
        """
        for name in self.unload:
            if name not in spec.adapters:
                raise NotFoundError(f"endpoint {spec.name} has no adapter {name}.", hint="List them without options.")
        kept = {name: location for name, location in spec.adapters.items() if name not in self.unload}
        return {**kept, **self.load}

    def __str__(self) -> str:
        return " ".join(["adapters", *(f"+{name}" for name in self.load), *(f"-{name}" for name in self.unload)])


class WeightsChange(Config):
    """The request of `raytide serve NAME --weights`: the location of the weights that the replicas should load."""

    location: bounds.Location
    """The location of the weights; "" for the weights of the spec's model."""


class SignalReport(Config):
    """The values that a user reports for the signals on which an endpoint scales."""

    values: dict[str, Annotated[float, Field(ge=0, le=1e12)]] = Field(min_length=1, max_length=16)

    def check(self, spec: ServeSpec) -> None:
        """Raises NotFoundError if the endpoint does not scale on one of the reported signals."""
        known = [signal.name for signal in spec.replicas.scale_on if signal.name not in METERS]
        for name in self.values:
            if name not in known:
                raise NotFoundError(
                    f"endpoint {spec.name} does not scale on {name[:100]}.",
                    hint=f"It scales on {', '.join(known)}." if known else "Name it in replicas.scale_on of its spec.",
                )
