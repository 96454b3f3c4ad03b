"""`metadata.raytide.tracing` of cluster.yaml: where traces go, and how many."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from raytide.core.config import Config


class TracingSection(Config):
    """Traces of requests and jobs, sent to a collector as OpenTelemetry's OTLP over HTTP. Off without an address."""

    otlp: Annotated[str, Field(pattern=r"^(https?://[^\s/@?#]+[^\s@?#]*)?$", max_length=2048)] = ""
    """The collector's base URL, such as `http://127.0.0.1:4318`; `/v1/traces` is added."""
    sample: float = Field(default=0.01, ge=0, le=1)
    """The share of requests that are traced, besides those whose client sends a sampled `traceparent`. Jobs are all
    traced."""
    most_per_s: float = Field(default=50.0, gt=0, le=10_000)
    """The most requests that each gateway process traces in a second, whatever clients ask for."""
    headers_env: Annotated[str, Field(pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$", max_length=200)] = ""
    """The variable with headers for the collector (`name=value,name=value`), where the cluster is started."""
