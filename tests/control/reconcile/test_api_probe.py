from __future__ import annotations

import httpx
import pytest

from raytide.control.reconcile.observation import ApiProbe


def test_the_door_is_open_while_the_api_answers() -> None:
    codes = [200, 503, 200]
    door = ApiProbe("http://127.0.9.1:7400")
    transport = httpx.MockTransport(lambda request: httpx.Response(codes.pop(0)))
    door._http = httpx.Client(base_url="http://127.0.9.1:7400", transport=transport)
    assert door.is_open()
    with pytest.raises(httpx.HTTPStatusError):
        door.is_open()
    assert door.is_open()
