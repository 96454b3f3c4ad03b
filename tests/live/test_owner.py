"""A test run that is killed, whatever way, leaves no cluster: the real pytest, with a real cluster in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from raytide.control.bootstrap.cluster_record import MARK
from raytide.core.io.process import marked

ROOT = Path(__file__).parents[2]
soak = pytest.mark.soak


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("signum", "with_workers", "send"),
    [
        pytest.param(signal.SIGKILL, True, os.kill, marks=soak),
        pytest.param(signal.SIGINT, False, os.kill, marks=soak),
        (signal.SIGINT, True, os.killpg),  # Ctrl-C: the terminal sends it to the workers too
        pytest.param(signal.SIGINT, True, os.kill, marks=soak),
        pytest.param(signal.SIGKILL, False, os.kill, marks=soak),
        pytest.param(signal.SIGTERM, False, os.kill, marks=soak),
        pytest.param(signal.SIGTERM, True, os.kill, marks=soak),
        pytest.param(signal.SIGTERM, True, os.killpg, marks=soak),
    ],
)
def test_a_killed_test_run_leaves_no_process(
    tmp_path: Path,
    eventually: Callable[..., None],
    signum: signal.Signals,
    with_workers: bool,
    send: Callable[[int, int], None],
) -> None:
    """`./dev test` is this process: the shell replaces itself with pytest."""
    told = tmp_path / "told.json"
    # What a shell runs in the background ignores Ctrl-C, and so would this.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "pytest", "tests/live/waits_with_a_cluster.py"]
    command += ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'inner'}", *(["-n1"] if with_workers else [])]
    run = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "WAITS_TELLS": str(told)},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        eventually(told.exists, within_s=150)
        left = json.loads(told.read_text())
        assert len(marked(MARK, left["cluster"])) > 5
    finally:
        send(run.pid, signum)
    run.wait(300)
    eventually(lambda: not marked("RAYTIDE_TEST_SESSION", left["session"]), within_s=100)
    eventually(lambda: not marked(MARK, left["cluster"]), within_s=60)
    assert not Path(left["temp_dir"]).exists(), "its cluster was ended in order"
