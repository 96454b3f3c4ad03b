"""Loads an endpoint and measures first token, inter-token, throughput and goodput, as `raytide bench` does."""

from raytide.sdk.bench.load.generator import BenchProgress, LoadGenerator
from raytide.sdk.bench.load.report import BenchReport
from raytide.sdk.bench.load.spec import BenchSpec, Slo

__all__ = ["BenchProgress", "BenchReport", "BenchSpec", "LoadGenerator", "Slo"]
