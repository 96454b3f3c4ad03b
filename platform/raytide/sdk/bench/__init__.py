"""Load on an endpoint, and what it answered: first token, inter-token, throughput, goodput. `raytide bench` runs it."""

from raytide.sdk.bench.load.generator import BenchProgress, LoadGenerator
from raytide.sdk.bench.load.report import BenchReport
from raytide.sdk.bench.load.spec import BenchSpec, Slo

__all__ = ["BenchProgress", "BenchReport", "BenchSpec", "LoadGenerator", "Slo"]
