"""Recording rules: expressions that many queries share. Prometheus computes each of them once in an evaluation."""

from raytide.core.telemetry.catalogue import application, model
from raytide.core.telemetry.metrics import Metric
from raytide.dashboards.rules.expressions import (
    Arithmetic,
    Expression,
    Quantile,
    Rate,
    Recorded,
    SetOperation,
    duration,
    max_by,
    ratio,
    select,
    sum_by,
)

WINDOWS_S = (300, 1800, 3600, 6 * 3600)
"""Two short and two long windows, as the SRE workbook pairs them (chapter 5, multiwindow multi-burn-rate alerts)."""


def _requests(window_s: int, **labels: str) -> Expression:
    return sum_by(Rate(select(application.REQUESTS, **labels), window_s), "endpoint")


def _burn_rate(window_s: int) -> Recorded:
    """Returns the burn rate of the error budget: the share of requests that missed the SLO, divided by the share that
    may miss it.
    """
    missed: Expression = sum_by(Rate(select(application.SLO_REQUESTS, met="false"), window_s), "endpoint")
    counted = sum_by(Rate(select(application.SLO_REQUESTS), window_s), "endpoint")
    missed = SetOperation(missed, "or", Arithmetic(counted, "*", 0))  # while none has missed it, no series says so
    budget = max_by(select(application.SLO_ERROR_BUDGET), "endpoint")
    return Recorded(f"endpoint:raytide_slo_burn:rate{duration(window_s)}", ratio(ratio(missed, counted), budget))


def _p99(name: str, histogram: Metric) -> Recorded:
    return Recorded(f"endpoint:{name}:p99_5m", Quantile(0.99, select(histogram), 300, ("endpoint",)))


BURN_RATES: dict[int, Recorded] = {window_s: _burn_rate(window_s) for window_s in WINDOWS_S}
"""The burn rates by window in seconds. At 1 the error budget of a month is used in a month."""

REQUEST_RATE = Recorded("endpoint:raytide_requests:rate5m", _requests(300))
FIRST_TOKEN_P99 = _p99("raytide_time_to_first_token_seconds", application.FIRST_TOKEN_SECONDS)
INTER_TOKEN_P99 = _p99("raytide_inter_token_seconds", application.INTER_TOKEN_SECONDS)
CACHE_HITS_15M, CACHE_HITS_1D = (
    Recorded(
        f"endpoint:raytide_prefix_hits:ratio{duration(window_s)}",
        ratio(
            sum_by(Rate(select(model.CACHED_TOKENS), window_s), "endpoint"),
            sum_by(Rate(select(model.PROMPT_TOKENS), window_s), "endpoint"),
        ),
    )
    for window_s in (900, 86400)
)

RECORDINGS: tuple[Recorded, ...] = (
    *BURN_RATES.values(),
    REQUEST_RATE,
    FIRST_TOKEN_P99,
    INTER_TOKEN_P99,
    CACHE_HITS_15M,
    CACHE_HITS_1D,
)
