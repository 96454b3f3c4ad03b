"""The result of a load test: throughput, goodput, errors, and the distributions of the measured times with the number
of values in each. It also shows how far the generator itself limited the load.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raytide.core.io.storage import full_disk_is_an_error
from raytide.sdk.bench.load.spec import BenchSpec, Slo
from raytide.sdk.bench.load.stream import BenchRecord

if TYPE_CHECKING:
    from rich.console import RenderableType

    from raytide.dashboards.figures.style import Picture

BUSY_SHARE = 0.8
"""The share of a core above which the generator's thread had too little time left to see answers as they arrived."""
LATE_SHARE, LATE_S = 0.05, 0.005
"""The generator is a bottleneck if the tail of its lateness exceeds both LATE_SHARE of the median time to first token
and LATE_S seconds.
"""
_PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of `n` measured times, in seconds. A percentile is None if there are too few values: p50 needs 1
    value, p99 needs 100.
    """

    n: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None

    @property
    def tail(self) -> float | None:
        """The highest known percentile, in seconds. None if there are no values."""
        return next((each for each in (self.p99, self.p95, self.p90, self.p50) if each is not None), None)

    @classmethod
    def of_values(cls, values: Iterable[float]) -> Distribution:
        found = np.fromiter(values, dtype=np.float64)
        if not len(found):
            return cls(0)
        known = [percent for percent in _PERCENTILES if percent == 50 or len(found) * (100 - percent) >= 100]
        at = dict(zip(known, np.percentile(found, known).tolist(), strict=True))
        shown = {f"p{percent}": value for percent, value in at.items()}
        return cls(len(found), mean=float(found.mean()), max=float(found.max()), **shown)


@dataclass(frozen=True, slots=True)
class GeneratorLoad:
    """The load of the generator itself: its CPU use and its lateness. If it was too busy or too late, the report
    measures the generator rather than the endpoint.
    """

    cpu_share: float
    """The share of one core that its thread used."""
    loop_late: Distribution
    """The lateness of its event loop: an answer may have been seen that much too late."""
    sent_late: Distribution
    """The lateness of requests when they were sent."""

    @classmethod
    def measured(
        cls, cpu_s: float, elapsed_s: float, loop_late_s: Sequence[float], sent_late_s: Sequence[float]
    ) -> GeneratorLoad:
        share = cpu_s / elapsed_s if elapsed_s > 0 else 0.0
        return cls(share, Distribution.of_values(loop_late_s), Distribution.of_values(sent_late_s))

    def bottleneck(self, median_ttft_s: float | None) -> str:
        """Returns the reason why the generator limited the measured load. The reason is empty if the server was the
        limit.
        """
        late_s = max(each.tail or 0.0 for each in (self.loop_late, self.sent_late))
        if self.cpu_share > BUSY_SHARE:
            return f"it used {self.cpu_share:.0%} of its core"
        if late_s > max(LATE_S, LATE_SHARE * (median_ttft_s or 0.0)):
            return f"it was up to {1e3 * late_s:.1f} ms late"
        return ""


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The result of one load. A notebook displays it, `table` formats it for a terminal, and `json` and `plot` are for
    files.
    """

    spec: BenchSpec
    duration_s: float
    """The seconds from the first request until the last token."""
    is_interrupted: bool
    sent: int
    answered: int
    errors: Mapping[str, int]
    """Failed requests by code."""
    unfinished: int
    """The number of requests that were still open when the load was interrupted."""
    prompt_tokens: int
    """The prompt tokens of answered requests, as the server counts them."""
    cached_tokens: int
    """The prompt tokens that the server had in its cache."""
    output_tokens: int
    """All generated tokens, including those of requests that did not end."""
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_s: Distribution
    """The time to the first token."""
    itl_s: Distribution
    """The times between events that carry tokens."""
    tpot_s: Distribution
    """Each request's mean time per token after the first."""
    e2e_s: Distribution
    """The time from sending a request until its last token."""
    most_in_flight: int
    good_requests: int
    """The number of answered requests that met all objectives of the SLO."""
    goodput_per_s: float
    generator: GeneratorLoad
    bottleneck: str
    """The reason why the generator, not the server, limited the measured load; empty if it did not."""
    records: Sequence[BenchRecord]

    def json(self) -> dict[str, Any]:
        """Returns the spec and all figures, without the records of requests."""
        names = [field.name for field in fields(self) if field.name not in ("spec", "records")]
        values = {name: getattr(self, name) for name in names}
        plain = {
            name: asdict(value) if isinstance(value, Distribution | GeneratorLoad) else value
            for name, value in values.items()
        }
        return {"spec": self.spec.model_dump(mode="json"), **plain}

    def write_records(self, path: Path) -> None:
        """Writes one JSON line for each request. The file is also a trace: `--trace` can replay it with requests of the
        same lengths at the same times. The prompts themselves are not written.
        """
        with full_disk_is_an_error(str(path)):
            path.write_text("".join(f"{json.dumps(_line(record))}\n" for record in self.records), encoding="utf-8")

    def table(self) -> RenderableType:
        from raytide.sdk.bench.load.table import table

        return table(self)

    def _repr_html_(self) -> str:
        from raytide.sdk.bench.load.table import as_html

        return as_html(self)

    def plot(self) -> Picture:
        from raytide.sdk.bench.load.plot import picture

        return picture(self)


def report_of(
    spec: BenchSpec, records: Sequence[BenchRecord], elapsed_s: float, load: GeneratorLoad, *, is_interrupted: bool
) -> BenchReport:
    """Returns the report on the requests in `records`."""
    answered = [record for record in records if record.is_answered]
    good = sum(is_good(record, spec.slo) for record in answered)
    prompt, output = sum(each.prompt_tokens for each in answered), sum(each.output_tokens for each in records)
    ttft = Distribution.of_values(each.ttft_s for each in answered if each.ttft_s is not None)

    def per_s(amount: float) -> float:
        return amount / elapsed_s if elapsed_s > 0 else 0.0

    return BenchReport(
        spec=spec,
        duration_s=elapsed_s,
        is_interrupted=is_interrupted,
        sent=len(records),
        answered=len(answered),
        errors=dict(Counter(each.error for each in records if each.error).most_common()),
        unfinished=sum(each.e2e_s is None for each in records),
        prompt_tokens=prompt,
        cached_tokens=sum(each.cached_tokens for each in answered),
        output_tokens=output,
        requests_per_s=per_s(len(answered)),
        output_tokens_per_s=per_s(output),
        total_tokens_per_s=per_s(prompt + output),
        ttft_s=ttft,
        itl_s=Distribution.of_values(gap for each in answered for gap in each.gaps_s),
        tpot_s=Distribution.of_values(each.tpot_s for each in answered if each.tpot_s is not None),
        e2e_s=Distribution.of_values(each.e2e_s for each in answered if each.e2e_s is not None),
        most_in_flight=most_in_flight(records),
        good_requests=good,
        goodput_per_s=per_s(good),
        generator=load,
        bottleneck=load.bottleneck(ttft.p50),
        records=records,
    )


def is_good(record: BenchRecord, slo: Slo) -> bool:
    """Returns whether an answered request met all objectives of the SLO. An objective counts as met if the request has
    no value for it.
    """
    pairs: Sequence[tuple[float | None, float | None]] = (
        (record.ttft_s, slo.ttft_s),
        (record.tpot_s, slo.tpot_s),
        (record.e2e_s, slo.e2e_s),
    )
    return all(bound is None or value is None or value <= bound for value, bound in pairs)


def most_in_flight(records: Iterable[BenchRecord]) -> int:
    """Returns the highest number of requests that were open at once."""
    return max((open_requests for _, open_requests in in_flight(records)), default=0)


def in_flight(records: Iterable[BenchRecord]) -> list[tuple[float, int]]:
    """Returns a list of (time in seconds, number of open requests), one entry for each change of that number.

    Requests that did not finish stay open.
    """
    changes = [(record.sent_s, 1) for record in records]
    changes += [(record.sent_s + record.e2e_s, -1) for record in records if record.e2e_s is not None]
    found, open_requests = [], 0
    for at_s, change in sorted(changes, key=lambda each: (each[0], -each[1])):
        open_requests += change
        found.append((at_s, open_requests))
    return found


def _line(record: BenchRecord) -> dict[str, object]:
    return {
        "t_s": round(record.sent_s, 6),
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens if record.is_answered else record.wanted_tokens,
        "cached_tokens": record.cached_tokens,
        "ttft_s": record.ttft_s,
        "tpot_s": record.tpot_s,
        "e2e_s": record.e2e_s,
        "error": record.error,
    }
