"""Metrics of clients: users' feedback on answers, and the latency at the client."""

from raytide.core.telemetry.catalogue.buckets import FIRST_TOKEN_S, REQUEST_S
from raytide.core.telemetry.metrics import counter, histogram

FEEDBACK = counter(
    "raytide_feedback", "Thumbs for answers, up or down, for as long as usage is kept", "endpoint", "revision", "thumb"
)
CLIENT_REQUEST_SECONDS = histogram(
    "raytide_client_request_seconds",
    "Time from a request to its end, as the SDK's endpoint handle measures it",
    REQUEST_S,
    "endpoint",
)
CLIENT_FIRST_TOKEN_SECONDS = histogram(
    "raytide_client_first_token_seconds",
    "Time from a request to its first token, as the SDK's endpoint handle measures it",
    FIRST_TOKEN_S,
    "endpoint",
)
