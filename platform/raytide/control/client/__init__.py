"""The HTTP client of the API."""

from raytide.control.client.api_client import ApiClient
from raytide.control.client.connections import HttpConnections

__all__ = ["ApiClient", "HttpConnections"]
