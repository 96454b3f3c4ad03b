"""Loads an endpoint and measures time to first token, inter-token latency, throughput and goodput, as `raytide bench`
does.
"""

from raytide.sdk.bench.load.generator import BenchProgress, LoadGenerator
from raytide.sdk.bench.load.report import BenchReport
from raytide.sdk.bench.load.spec import BenchSpec, Slo

__all__ = ["BenchProgress", "BenchReport", "BenchSpec", "LoadGenerator", "Slo"]
