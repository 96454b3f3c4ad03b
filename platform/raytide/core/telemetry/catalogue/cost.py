"""Metrics of money, budgets and unit costs."""

from raytide.core.telemetry.metrics import gauge

NODE_PRICE = gauge("raytide_price_usd_per_hour", "Hourly price of the billed nodes", "type", "market")
BOOKED = gauge(
    "raytide_booked_usd",
    "Cost booked in the ledger, by kind of entry. That of jobs falls when lost work becomes waste",
    "kind",
)
BUDGET_USED = gauge("raytide_team_budget_used_ratio", "Share of its budget that a team has used", "team")
BUDGET_FORECAST = gauge(
    "raytide_team_budget_forecast_ratio",
    "Share of its budget that a team will have used at the end of the period, at its present rate",
    "team",
)
TOKENS_PER_JOULE = gauge(
    "raytide_endpoint_tokens_per_joule",
    "Generated tokens per joule of an endpoint's share of nodes, at the present rate and power",
    "endpoint",
)
USD_PER_MTOKEN = gauge(
    "raytide_endpoint_usd_per_mtoken",
    "Cost of an endpoint's share of nodes per million generated tokens, at the present rates",
    "endpoint",
)
