"""`raytide run` on real raylets: torch over two nodes, a node that dies, a stop."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.actors.gang.test_packages import write_wheel
from tests.cluster_fixture import files_below, kill_raylet

import raytide as rt
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.control.supervision.log_rotation import DRIVER_KEPT_BYTES
from raytide.core.objects.job import JobState

pytestmark = pytest.mark.cluster

STAY = """
import os, time
print("attempt", os.environ["RAYTIDE_ATTEMPT"], "pid", os.getpid(), flush=True)
time.sleep(600)
"""


def test_a_script_has_the_packages_that_it_names_or_ends_with_pips_words(
    raytide_cli: Callable[..., subprocess.CompletedProcess[str]], tide: rt.Client, tmp_path: Path
) -> None:
    write_wheel(tmp_path / "wheels", "1.0")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "helper.py").write_text("name = 'tidelib'\n")
    (tmp_path / "work" / "show.py").write_text("import helper, tidelib; print(helper.name, tidelib.WHERE)\n")
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels"), "TMPDIR": str(tmp_path)}
    given = [part for name, value in pip.items() for part in ("--env", f"{name}={value}")]
    (tmp_path / "requirements.txt").write_text("# ours\ntidelib == 1.0 # pinned\n")
    options = ("--working-dir", str(tmp_path / "work"), "--requirements", str(tmp_path / "requirements.txt"), *given)
    done = raytide_cli("run", *options, str(tmp_path / "work" / "show.py"))
    assert done.returncode == 0 and "tidelib 1.0" in done.stdout.splitlines(), done.stdout + done.stderr
    run = tide.run(tmp_path / "work" / "show.py", working_dir=tmp_path / "work", env=pip, pip=["tidelib==9"])
    with pytest.raises(rt.RaytideError, match="No matching distribution found for tidelib==9"):
        run.wait(timeout_s=360.0)
    assert "No matching distribution" in run.logs()


def test_a_script_outlives_a_dead_node_and_its_processes_end_when_it_is_stopped(
    live: LocalCluster, tide: rt.Client, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    (tmp_path / "stay.py").write_text(STAY)
    run = tide.run(tmp_path / "stay.py", nodes=2, working_dir=tmp_path)

    def pids(attempt: int) -> dict[str, int]:
        """Returns the processes by what their lines begin with, which is the rank."""
        lines = [line.split() for line in run.logs().splitlines() if f"attempt {attempt} pid" in line]
        return {line[0]: int(line[-1]) for line in lines}

    eventually(lambda: pids(1).keys() == {"[0]", "[1]"})
    lease = run.refresh().view.lease
    assert lease is not None
    kill_raylet(live, lease.usable[1].node_id)
    eventually(lambda: len(pids(2)) == 2)
    assert not is_running(pids(1)["[0]"]), "it ends before the next attempt"
    eventually(lambda: not is_running(pids(1)["[1]"]))  # the lost node's keeper ends it, and nobody waits for that
    assert run.refresh().view.job.restarts == 0
    run.stop()
    eventually(lambda: run.refresh().state is JobState.STOPPED)
    eventually(lambda: not any(map(is_running, pids(2).values())))


def is_running(pid: int) -> bool:
    """A process that has ended and that its parent has not heard of yet is none."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


PRINTS = """
import sys
line = "x" * 990
for number in range(80_000):
    sys.stdout.write(f"{number:06d} {line}\\n")
print("that was all", flush=True)
"""


def test_a_script_that_prints_without_end_fills_no_disk(
    live: LocalCluster, tide: rt.Client, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    """80 MB; its log keeps the last 32 MiB."""
    (tmp_path / "prints.py").write_text(PRINTS)
    run = tide.run(tmp_path / "prints.py", working_dir=tmp_path)
    eventually(lambda: tide.client.job(run.id).job.state is JobState.SUCCEEDED, within_s=200)
    (log,) = (file for file in files_below(live.temp_dir) if file.name == f"job-driver-raytide-{run.id}-0.log")
    assert log.stat().st_size < 2 * DRIVER_KEPT_BYTES
    part = tide.client.log_part(run.id)
    assert "bytes were dropped here" in part.text.splitlines()[0]
    last = tide.client.log_part(run.id, tail=1)
    assert last.text.splitlines()[-1].endswith("that was all")
    assert int(last.after.partition(":")[2]) > 79_000_000, "a place is what it was before"
