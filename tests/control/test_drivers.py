"""What Ray's job service says about drivers."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from raytide.control.drivers import Drivers
from raytide.core.errors import ClusterError
from raytide.jobs.job import DriverKey


def test_output_that_cannot_be_read_now_is_not_taken_for_none(tmp_path: Path) -> None:
    """Whoever follows it would print all of it again."""
    answers = [httpx.Response(404), httpx.Response(200, json={"logs": "step 1"}), httpx.Response(500, text="no agent")]
    drivers = Drivers("http://ray", tmp_path, {})
    drivers._http = httpx.Client(base_url="http://ray", transport=httpx.MockTransport(lambda _: answers.pop(0)))
    assert [drivers.logs(DriverKey("job-1", 0)) for _ in range(2)] == ["", "step 1"]
    with pytest.raises(ClusterError, match="no agent"):
        drivers.logs(DriverKey("job-1", 0))
