"""Metrics of clients: what they think of answers, and the latency that they see."""

from raytide.core.telemetry.catalogue.buckets import FIRST_TOKEN_S, REQUEST_S
from raytide.core.telemetry.metrics import Metric

FEEDBACK = Metric(
    "raytide_feedback",
    "counter",
    "Thumbs for answers, up or down, for as long as usage is kept",
    "client",
    labels=("endpoint", "revision", "thumb"),
)
CLIENT_REQUEST_SECONDS = Metric(
    "raytide_client_request_seconds",
    "histogram",
    "Time from a request to its end, as the SDK's endpoint handle measures it",
    "client",
    "seconds",
    ("endpoint",),
    REQUEST_S,
)
CLIENT_FIRST_TOKEN_SECONDS = Metric(
    "raytide_client_first_token_seconds",
    "histogram",
    "Time from a request to its first token, as the SDK's endpoint handle measures it",
    "client",
    "seconds",
    ("endpoint",),
    FIRST_TOKEN_S,
)
