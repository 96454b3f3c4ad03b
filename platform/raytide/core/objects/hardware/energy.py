"""The section of cluster.yaml for energy and emissions."""

from __future__ import annotations

from pydantic import Field

from raytide.core.config import Config


class EnergySection(Config):
    """The figures with which raytide estimates energy that is not measured, and computes emissions from energy."""

    watts_per_core: float = Field(default=3.5, ge=0, le=1000)
    """The power in watts of a busy core: the Cloud Carbon Footprint project's mean for AWS (2022)."""
    grams_co2_per_kwh: float = Field(default=445.0, ge=0, le=5000)
    """The emissions per kWh of the electricity where the nodes are: the world's mean in 2024 (IEA, Electricity
    2025)."""
