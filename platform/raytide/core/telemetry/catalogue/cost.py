"""Metrics of money, budgets and unit costs."""

from raytide.core.telemetry.metrics import Metric

NODE_PRICE = Metric(
    "raytide_price_usd_per_hour", "gauge", "Hourly price of the billed nodes", "cost", "usd", ("type", "market")
)
BOOKED = Metric(
    "raytide_booked_usd", "counter", "Cost booked in the ledger, by kind of entry", "cost", "usd", ("kind",)
)
BUDGET_USED = Metric(
    "raytide_team_budget_used_ratio", "gauge", "Share of its budget that a team has used", "cost", "ratio", ("team",)
)
BUDGET_FORECAST = Metric(
    "raytide_team_budget_forecast_ratio",
    "gauge",
    "Share of its budget that a team will have used at the end of the period, at its present rate",
    "cost",
    "ratio",
    ("team",),
)
TOKENS_PER_JOULE = Metric(
    "raytide_endpoint_tokens_per_joule",
    "gauge",
    "Generated tokens per joule of an endpoint's share of nodes, at the present rate and power",
    "cost",
    "tokens",
    ("endpoint",),
)
USD_PER_MTOKEN = Metric(
    "raytide_endpoint_usd_per_mtoken",
    "gauge",
    "Cost of an endpoint's share of nodes per million generated tokens, at the present rates",
    "cost",
    "usd",
    ("endpoint",),
)
