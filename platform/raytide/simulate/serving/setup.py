"""The settings of a serving simulation. Every field is an option of `raytide simulate serving`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from raytide.core.config import Config

USD_H = {"v100": (3.06, 0.918), "k80": (0.90, 0.27)}
"""The on-demand and the spot price in dollars of an hour of one GPU where the traces were recorded; other GPUs need the
options.
"""


class ServingSetup(Config):
    requests: Path
    """A CSV file with the columns t_s, prompt_tokens and output_tokens. Its gaps and its pairs of token counts are
    repeated to fill the days.
    """
    envelope: Path | None = None
    """A CSV file with the columns hour and requests, which give the shape of the rate; None for a constant rate."""
    spot: Path
    collection: str
    """A part of the keys of the traces to use."""
    gpu: str = "v100"
    gpus_per_node: int = Field(default=1, ge=1)
    kind: Literal["availability", "preemption"] = "availability"
    depth: int = Field(default=4, ge=1)
    """The factor by which the nodes of each trace are multiplied."""
    policy: str = "raytide"
    queue: Literal["first-come", "deadline"] | None = None
    """The order in which waiting requests start: by default `deadline` for raytide, as in its replicas, and
    `first-come` for the others, as published."""
    resumes: bool | None = None
    """True if answers of lost nodes continue from their tokens elsewhere, as through raytide's gateway; False if they
    start again. By default only raytide's continue.
    """
    slo_ttft_s: float = Field(default=5.0, gt=0)
    slo_target: float = Field(default=0.99, gt=0, lt=1)
    """The SLO target of raytide's policy; other policies do not use it."""
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
