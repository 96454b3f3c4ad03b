from __future__ import annotations

import httpx
import pytest

from raytide.control.door import Door
from raytide.core.clock import VirtualClock


def test_the_door_is_open_since_the_first_look_after_the_api_was_away() -> None:
    codes = [200, 200, 503, 200]
    clock = VirtualClock(100.0)
    door = Door("http://127.0.9.1:7400", clock)
    transport = httpx.MockTransport(lambda request: httpx.Response(codes.pop(0)))
    door._http = httpx.Client(base_url="http://127.0.9.1:7400", transport=transport)
    assert door.open_since_s() == 100.0
    clock.advance(5.0)
    assert door.open_since_s() == 100.0
    with pytest.raises(httpx.HTTPStatusError):
        door.open_since_s()
    clock.advance(5.0)
    assert door.open_since_s() == 110.0
