"""Sends JSON to a URL, signed with a shared key so that the receiver can verify the sender."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from raytide.core.errors import ClusterError

SIGNATURE = "X-Raytide-Signature"


def signature_of(body: bytes, secret: str) -> str:
    """Returns `sha256=` and the HMAC-SHA256 of the body in hex, the format in which GitHub signs its webhooks."""
    return "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


def post_signed(url: str, message: Mapping[str, Any], secret: str, key: str, timeout_s: float) -> str:
    """Posts a message as JSON and returns the response's status in words. Raises ClusterError if there is no response,
    or if its status is not 2xx.

    The message is signed if `secret` is not empty. Redirects are not followed. `key` is sent as `Idempotency-Key`, so
    that a receiver can drop a repetition; an empty one is not sent.
    """
    import httpx

    body = json.dumps(message).encode()
    headers = {"Content-Type": "application/json", **({"Idempotency-Key": key} if key else {})}
    if secret:
        headers[SIGNATURE] = signature_of(body, secret)
    try:
        post = httpx.stream("POST", url, content=body, headers=headers, timeout=timeout_s, follow_redirects=False)
        with post as response:  # its body is not read: it may never end
            pass
    except (httpx.HTTPError, httpx.InvalidURL) as error:  # the address may be a secret: its host is enough
        raise ClusterError(f"{_host(url)} did not answer: {type(error).__name__}.") from None
    if not response.is_success:
        raise ClusterError(f"{_host(url)} answered {response.status_code}.")
    return f"{_host(url)} answered {response.status_code}"


def _host(url: str) -> str:
    from urllib.parse import urlsplit

    return urlsplit(url).hostname or "the receiver"
