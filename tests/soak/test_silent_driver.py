"""A stopped driver says nothing, and its machine keeps the connection open for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

import raytide as rt
from raytide.actors.gang import gang
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


def test_a_driver_that_is_stopped_loses_its_lease_once_its_poll_has_ended(
    live: LocalCluster, tide: rt.Client, eventually: Callable[..., None]
) -> None:
    driver = subprocess.Popen([sys.executable, "-c", HOLD], env={**os.environ, **live.environment()})
    try:
        eventually(lambda: any(run.state is JobState.RUNNING for run in named(tide)))
        (run,) = named(tide)
        driver.send_signal(signal.SIGSTOP)
        silent_s = gang._POLL_S + run.view.job.spec.heartbeat_timeout_s
        eventually(lambda: run.refresh().view.job.is_final, within_s=silent_s + 15.0)
        assert "has not asked for its lease" in run.view.job.reason
    finally:
        driver.kill()
        driver.wait()
