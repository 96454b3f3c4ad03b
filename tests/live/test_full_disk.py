"""A real cluster whose run folder lies on a disk that is full for a while: what runs goes on, and nothing is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from tests.disk_fixture import Disk, mounted

from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.control.client import ApiClient
from raytide.core.errors import ClusterError
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import JobKind, JobSpec, JobState

SHAPE = Shape(members=1, resources={"CPU": 1.0})
HEARTBEAT_S = 10.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    yield from mounted(tmp_path / "home", "200m")


@pytest.fixture
def there(disk: Disk) -> Iterator[LocalCluster]:
    with local.temporary(disk.path, name="full") as up:
        yield up


def spec(name: str) -> JobSpec:
    return JobSpec(kind=JobKind.GANG, name=name, gang=GangSpec(shapes=(SHAPE,)), heartbeat_timeout_s=HEARTBEAT_S)


def submit_until_refused(client: ApiClient) -> list[str]:
    accepted: list[str] = []

    def submit() -> None:
        while True:
            accepted.append(client.submit(spec("accepted")).job.id)

    with pytest.raises(ClusterError, match="Free space"):
        submit()
    return accepted


def troubles(of: LocalCluster) -> list[str]:
    found: list[str] = httpx.get(f"{of.api_url}/health", timeout=60.0).json()["troubles"]
    return found


@pytest.mark.cluster
def test_a_cluster_outlives_a_full_disk(there: LocalCluster, disk: Disk, eventually: Callable[..., None]) -> None:
    client = ApiClient.from_run_dir(there.run_dir)
    job = client.submit(spec("runs")).job.id
    over = threading.Event()

    def ask() -> None:
        """As a gang's driver does."""
        asker, epoch = ApiClient.from_run_dir(there.run_dir), -1
        while not over.is_set():
            try:
                epoch = asker.wait_lease(job, newer_than=epoch, timeout_s=2.0).epoch
            except ClusterError:
                over.wait(0.2)

    driver = threading.Thread(target=ask)
    driver.start()
    try:
        eventually(lambda: client.job(job).job.state is JobState.RUNNING)
        before = {what: there.process(what) for what in ("head", "supervisor", "controller", "api")}
        disk.fill()
        accepted = submit_until_refused(client)
        eventually(lambda: "disk" in troubles(there))
        eventually(lambda: any("free space there" in error for error in client.status().errors))
        over.wait(2 * HEARTBEAT_S)  # longer than anybody may be silent
        assert {what: there.process(what) for what in before} == before
        assert all(process is not None and process.alive for process in before.values())
        assert client.job(job).job.state is JobState.RUNNING
        api = before["api"]
        assert api is not None
        api.send(signal.SIGKILL)
        eventually(lambda: not api.alive)

        def answers() -> bool:
            with suppress(httpx.HTTPError):
                return httpx.get(f"{there.api_url}/health", timeout=60.0).is_success
            return False

        eventually(answers)
        with pytest.raises(ClusterError, match="Free space"):
            client.submit(spec("refused"))
        disk.free()
        eventually(lambda: not troubles(there))
        assert client.submit(spec("after")).job.id not in accepted
        names = [view.job.spec.name for view in client.jobs(limit=1000)]
        assert (names.count("accepted"), names.count("refused"), names.count("after")) == (len(accepted), 0, 1)
        assert client.job(job).job.state is JobState.RUNNING
    finally:
        over.set()
        driver.join()
    closed = local.down("full")
    assert closed is not None
    assert closed.differences == ()
