"""The certificates of https addresses: read from a real TLS server, whoever signed them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from tests.dashboards.alerts.self_signed import server_context

from raytide.core.objects.cluster_config import RaytideSection
from raytide.dashboards.monitor import certificates
from raytide.dashboards.monitor.certificates import CertificateWatch, addresses_of

DAY_S = 86_400.0


async def _close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def test_the_time_left_is_shown_and_kept_when_the_server_is_gone(tmp_path: Path) -> None:
    server = await asyncio.start_server(_close, "127.0.0.1", 0, ssl=server_context(tmp_path))
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    ahead_s = 0.0
    watch = CertificateWatch([address], lambda: time.time() + ahead_s)
    assert list(watch.samples()) == [], "before the first look nothing is known"
    await watch.look(address)
    server.close()
    await server.wait_closed()
    (sample,) = watch.samples()
    assert sample.labels == (address,)
    assert sample.value == pytest.approx(DAY_S, abs=600.0)
    await watch.look(address)
    ahead_s = 2 * DAY_S
    (sample,) = watch.samples()
    assert sample.value == pytest.approx(-DAY_S, abs=600.0), "it has expired"


async def test_an_address_that_speaks_no_tls_or_never_answers_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "_TIMEOUT_S", 0.2)
    plain = await asyncio.start_server(_close, "127.0.0.1", 0)
    hung = await asyncio.start_server(lambda reader, writer: asyncio.sleep(0), "127.0.0.1", 0)
    addresses = [f"127.0.0.1:{each.sockets[0].getsockname()[1]}" for each in (plain, hung)]
    watch = CertificateWatch(addresses)
    for address in addresses:
        await watch.look(address)
    assert list(watch.samples()) == []
    plain.close()
    hung.close()


def test_every_https_address_of_the_settings_is_watched_once() -> None:
    section = RaytideSection.parse(
        {
            "node_types": {},
            "gateway": {"hosted": [{"base_url": "https://api.example.com/v1", "api_key_env": "KEY"}]},
            "tracing": {"otlp": "http://127.0.0.1:4318"},
            "monitoring": {
                "certificates": [
                    "https://llm.example.com",
                    "https://api.example.com/other",
                    "http://plain.example.com",
                ],
                "actions": [{"alert": "NodeLost", "do": "webhook", "url": "https://hooks.example.com:8443/x"}],
                "notify": {
                    "slack": {"url_env": "SLACK"},
                    "pagerduty": {"routing_key_env": "PD"},
                    "webhook": {"url": "https://[2001:db8::1]/hook"},
                    "email": {
                        "host": "mail.example.com",
                        "port": 465,
                        "tls": "implicit",
                        "sender": "a@b.c",
                        "to": ["d@e.f"],
                    },
                },
            },
        },
        where="test",
    )
    assert addresses_of(section, {"SLACK": "https://slack.example.com/T/B/x"}) == (
        "llm.example.com:443",
        "api.example.com:443",
        "hooks.example.com:8443",
        "[2001:db8::1]:443",
        "events.pagerduty.com:443",
        "slack.example.com:443",
        "mail.example.com:465",
    )
    assert addresses_of(RaytideSection(node_types={}), {}) == ()
