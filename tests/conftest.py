"""What every test gets: no process outlives the session, no network for model hubs, no deadline in property tests."""

import os
import uuid
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import settings
from tests.cluster_fixture import eventually, live, raytide_cli, tide
from tests.moto_fixture import aws, aws_for_ray, moto_url

__all__ = ["aws", "aws_for_ray", "eventually", "live", "moto_url", "raytide_cli", "tide"]

# Times are benchmarks; a slow machine must not fail a property.
settings.register_profile("raytide", deadline=None, print_blob=True)
settings.load_profile("raytide")

os.environ["HF_HUB_OFFLINE"] = "1"

if "PYTEST_XDIST_WORKER" in os.environ:  # two workers with a thread for each core would wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Carried by everything this session starts, however far it is detached.
MARK = "RAYTIDE_TEST_SESSION"
os.environ[MARK] = uuid.uuid4().hex

# Ends with the interpreter that started it, which is still running when this looks.
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def started_here() -> list[psutil.Process]:
    """Children, and whatever carries this session's mark after its parent is gone; this process is left out."""
    me = psutil.Process()
    found = set(me.children(recursive=True))
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == os.environ[MARK]:
                found.add(process)
        except psutil.Error:  # it ended, or belongs to another user and so not to this session
            continue
    return sorted((process for process in found if process != me and not is_helper(process)), key=lambda one: one.pid)


def is_helper(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
        return process.status() == psutil.STATUS_ZOMBIE or any(helper in command for helper in HELPERS)
    except psutil.NoSuchProcess:
        return True


# What is dear to start, and so is started in one worker only.
SHARED = ("live", "vllm_cores")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of several workers, one takes a file; all that need the same shared thing go together, and begin first."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return

    def group(item: pytest.Item) -> str:
        fixtures = getattr(item, "fixturenames", ())
        return next((name for name in SHARED if name in fixtures), item.nodeid.partition("::")[0])

    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))
    items.sort(key=lambda item: group(item) not in SHARED)


@pytest.fixture(scope="session", autouse=True)
def no_process_outlives_the_session() -> Iterator[None]:
    yield
    _, alive = psutil.wait_procs(started_here(), timeout=10)
    left = [f"{process.pid} {' '.join(process.cmdline())[:200]}" for process in alive if process.is_running()]
    for process in alive:
        process.kill()
    assert not left, "the tests left processes behind:\n" + "\n".join(left)
