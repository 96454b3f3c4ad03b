"""Reads the expiry of TLS certificates: of the servers that raytide calls, and of addresses listed in cluster.yaml.

A listed address can be the proxy in front of the cluster. raytide itself serves no TLS.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from urllib.parse import urlsplit

from cryptography import x509

from raytide.core.logs import logger
from raytide.core.objects.cluster_config import RaytideSection
from raytide.core.telemetry.catalogue import monitoring as m
from raytide.core.telemetry.metrics import MetricSample

log = logger(__name__)

PERIOD_S = 3600.0
_RETRY_S = 300.0
_TIMEOUT_S = 20.0
MOST_ADDRESSES = 200


def addresses_of(settings: RaytideSection, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the `host:port` addresses of the https URLs in cluster.yaml, and of a mail server that uses implicit TLS.

    `environment` has the values of URLs that are secrets.
    """
    monitoring, tracing = settings.monitoring, settings.tracing
    notify = monitoring.notify
    urls = [
        *monitoring.certificates,
        *(api.base_url for api in settings.gateway.hosted),
        *(action.url for action in monitoring.actions if action.url is not None),
        "" if notify.webhook is None else notify.webhook.url,
        "" if notify.pagerduty is None else notify.pagerduty.url,
        "" if notify.slack is None else environment.get(notify.slack.url_env, ""),
        tracing.otlp,
    ]
    found = dict.fromkeys(address for url in urls if (address := _https_address(url)))
    if (mail := notify.email) is not None and mail.tls == "implicit":
        found[f"{mail.host}:{mail.port}"] = None
    return tuple(found)[:MOST_ADDRESSES]


def _https_address(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port or 443
    except ValueError:
        return ""
    host = parts.hostname or ""
    return f"{f'[{host}]' if ':' in host else host}:{port}" if parts.scheme == "https" and host else ""


class CertificateWatch:
    """Tracks when the certificate of each address expires."""

    def __init__(self, addresses: Iterable[str], now_s: Callable[[], float] = time.time) -> None:
        self._now_s = now_s
        self._expires_s: dict[str, float | None] = dict.fromkeys(addresses)
        """The Unix time at which each certificate expires; None while it is not known."""

    async def run(self) -> None:
        """Reads all certificates every hour, until it is cancelled. Reads more often while an expiry is unknown.

        Returns at once if there are no addresses.
        """
        while self._expires_s:
            await asyncio.gather(*(self.look(address) for address in self._expires_s))
            await asyncio.sleep(_RETRY_S if None in self._expires_s.values() else PERIOD_S)

    async def look(self, address: str) -> None:
        """Reads the certificate at one address. If the address does not answer, the last known expiry stays."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                self._expires_s[address] = await _expiry(address)
        except (OSError, TimeoutError, ValueError) as error:  # ssl's errors are OSErrors
            log.warning("a certificate cannot be read", extra={"address": address, "error": repr(error)})

    def samples(self) -> Iterator[MetricSample]:
        now_s = self._now_s()
        for address, expires_s in self._expires_s.items():
            if expires_s is not None:
                yield MetricSample(m.CERTIFICATE_LEFT, expires_s - now_s, (address,))


async def _expiry(address: str) -> float:
    """Returns the Unix time at which the certificate expires. The certificate is only read, and nothing is sent: so one
    that has expired, or that nobody here trusts, is read too.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=host)
    try:
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.close()
    return x509.load_der_x509_certificate(certificate).not_valid_after_utc.timestamp()
