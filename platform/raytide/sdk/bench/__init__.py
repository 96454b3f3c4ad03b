"""Sends load to an endpoint and measures the endpoint's time to first token, inter-token latency, throughput and
goodput. `raytide bench` uses this package.
"""

from raytide.sdk.bench.load.generator import BenchProgress, LoadGenerator
from raytide.sdk.bench.load.report import BenchReport
from raytide.sdk.bench.load.spec import BenchSpec, Slo

__all__ = ["BenchProgress", "BenchReport", "BenchSpec", "LoadGenerator", "Slo"]
