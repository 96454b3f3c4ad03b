"""The inputs of a serving simulation; every field is an option of `raytide simulate serving`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from raytide.core.config import Config

USD_H = {"v100": (3.06, 0.918), "k80": (0.90, 0.27)}
"""On-demand and spot price of an hour of one GPU where the traces were taken; other GPUs need the options."""


class ServingSetup(Config):
    requests: Path
    """Columns t_s, prompt_tokens and output_tokens. Its gaps and its pairs of tokens are repeated to fill the days."""
    envelope: Path | None = None
    """Columns hour and requests: the shape of the rate. Flat when left out."""
    spot: Path
    collection: str
    """Part of the traces' keys."""
    gpu: str = "v100"
    gpus_per_node: int = Field(default=1, ge=1)
    kind: Literal["availability", "preemption"] = "availability"
    depth: int = Field(default=4, ge=1)
    """A factor on the nodes of each trace."""
    policy: str = "raytide"
    queue: Literal["first-come", "deadline"] | None = None
    """The order in which waiting requests start: by default `deadline` for raytide, as in its replicas, and
    `first-come` for the others, as published."""
    resumes: bool | None = None
    """True if answers of lost nodes go on from their tokens elsewhere, as through raytide's gateway; else they start
    again. By default only raytide's go on."""
    slo_ttft_s: float = Field(default=5.0, gt=0)
    slo_target: float = Field(default=0.99, gt=0, lt=1)
    """Used by raytide's policy only."""
    days: float = Field(default=7.0, gt=0, le=366)
    peak_rps: float = Field(default=6.0, gt=0)
    prefill_tps: float = Field(default=1500.0, gt=0)
    slots: int = Field(default=8, ge=1)
    tpot_ms: float = Field(default=60.0, ge=0)
    max_replicas: int = Field(default=24, ge=1)
    cold_start_s: float = Field(default=180.0, ge=0)
    notice_s: float = Field(default=0.0, ge=0)
    seed: int = Field(default=0, ge=0)
    ondemand_usd_h: float | None = Field(default=None, gt=0)
    """The price of a node; by default the GPU's known price times its GPUs."""
    spot_usd_h: float | None = Field(default=None, gt=0)

    @property
    def horizon_s(self) -> float:
        return self.days * 86400.0
