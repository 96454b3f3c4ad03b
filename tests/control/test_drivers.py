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


def test_what_ray_writes_before_a_driver_is_left_out_of_its_log(tmp_path: Path) -> None:
    setting_up = "2026-11-22 00:50:07,258\tINFO job_manager.py:581 -- Runtime env is setting up.\n"
    preface = f"{setting_up}Running entrypoint for job raytide-job-3-0: exec python -m raytide.control.driver\n"
    texts = [setting_up, preface, f"{preface}[0] hello\n", f"[0] hello\n{preface}"]
    answers = [httpx.Response(200, json={"logs": text}) for text in texts]
    drivers = Drivers("http://ray", tmp_path, {})
    drivers._http = httpx.Client(transport=httpx.MockTransport(lambda _: answers.pop(0)), base_url="http://ray")
    found = [drivers.logs(DriverKey("job-3", 0)) for _ in texts]
    assert found == ["", "", "[0] hello\n", f"[0] hello\n{preface}"]
