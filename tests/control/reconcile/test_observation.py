from __future__ import annotations

import httpx
import pytest

from raytide.control.reconcile.observation import ApiProbe


def test_the_probe_raises_while_the_api_does_not_answer() -> None:
    codes = [200, 503, 200]
    probe = ApiProbe("http://127.0.9.1:7400")
    transport = httpx.MockTransport(lambda request: httpx.Response(codes.pop(0)))
    probe._http = httpx.Client(base_url="http://127.0.9.1:7400", transport=transport)
    assert probe.answers()
    with pytest.raises(httpx.HTTPStatusError):
        probe.answers()
    assert probe.answers()
