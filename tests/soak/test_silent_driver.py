"""A driver whose machine is gone says nothing, and nobody hangs up for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

import raytide as rt
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.core.objects.job import JobState

pytestmark = [pytest.mark.soak, pytest.mark.cluster]

HOLD = """
import time
import raytide as rt
with rt.gang(name="silent"):
    time.sleep(600)
"""


def named(tide: rt.Client) -> list[rt.Run]:
    return [run for run in tide.jobs() if run.view.job.spec.name == "silent"]


def test_a_driver_that_falls_silent_loses_its_lease_within_twenty_seconds(
    live: LocalCluster, tide: rt.Client, eventually: Callable[..., None]
) -> None:
    driver = subprocess.Popen([sys.executable, "-c", HOLD], env={**os.environ, **live.environment()})
    try:
        eventually(lambda: any(run.state is JobState.RUNNING for run in named(tide)))
        (run,) = named(tide)
        driver.send_signal(signal.SIGSTOP)  # its connection stays open, as that of a machine without power does
        stopped_s = time.monotonic()
        eventually(lambda: run.refresh().view.job.is_final)
        assert time.monotonic() - stopped_s < 20.0  # what is promised to whoever waits for its nodes
    finally:
        driver.kill()
        driver.wait()
