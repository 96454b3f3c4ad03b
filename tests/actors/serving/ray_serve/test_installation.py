"""Packages of replicas that pip cannot install: pip is not run in a tight loop, and the reason is kept for all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from raytide.actors.serving.ray_serve import installation
from raytide.actors.serving.ray_serve.installation import WAITS_S, Installation
from raytide.actors.serving.ray_serve.keys import failure_of, install_key
from raytide.core.errors import ClusterError, ConfigError, RaytideError, StorageError
from raytide.core.objects.endpoint_load import InstallFailure

PIP = ("tidelib==3.0",)


class Shared(dict[bytes, bytes]):
    """The records, in a process."""

    def put(self, key: bytes, value: bytes) -> None:
        self[key] = value

    def delete(self, key: bytes) -> None:
        self.pop(key, None)

    def failure(self) -> InstallFailure | None:
        return failure_of(self.get(install_key("m")))


class Pip:
    """Raises one error after the other, then installs."""

    def __init__(self, *errors: RaytideError) -> None:
        self.errors, self.runs, self.waits = list(errors), 0, list[float]()

    def install(self, requirements: Sequence[str]) -> str:
        self.runs += 1
        if self.errors:
            raise self.errors.pop(0)
        return "/env/bin/python"

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)


def replica(records: Shared, pip: Pip, node: str = "n1") -> Installation:
    return Installation("m", node, records, pip.install, pip.sleep)


async def test_packages_that_can_never_be_installed_are_tried_once_on_a_node() -> None:
    records, pip = Shared(), Pip(ConfigError("no such package"), ConfigError("here neither"))
    for _ in range(5):
        with pytest.raises(ConfigError, match="no such package"):
            await replica(records, pip).python(PIP)
    assert (pip.runs, pip.waits) == (1, [])
    assert records.failure() == InstallFailure("no such package", "n1", is_final=True)
    with pytest.raises(ConfigError, match="here neither"):
        await replica(records, pip, "n2").python(PIP)


class EndedError(Exception):
    """Serve ends the process."""


async def test_a_replica_of_an_endpoint_that_runs_waits_for_its_end_so_that_serve_starts_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def end() -> None:
        raise EndedError

    monkeypatch.setattr(installation, "wait_for_end", end)
    records, pip = Shared(), Pip()
    first = replica(records, pip)
    assert await first.python(PIP) == "/env/bin/python"
    first.begun()
    pip.errors = [ConfigError("no such package")]
    with pytest.raises(EndedError):
        await replica(records, pip, "n2").python(PIP)
    assert records.failure() == InstallFailure("no such package", "n2", is_final=True)


async def test_an_index_that_fails_is_asked_again_more_and_more_seldom() -> None:
    records, pip = Shared(), Pip(ClusterError("503"), StorageError("no space left"), ClusterError("503 again"))
    assert await replica(records, pip).python(PIP) == "/env/bin/python"
    assert pip.waits == list(WAITS_S[:3])
    assert records.failure() is None, "it is over"


async def test_a_replica_gives_an_index_up_that_fails_for_long_and_says_why() -> None:
    records, pip = Shared(), Pip(*[ClusterError("503")] * 99)
    with pytest.raises(ClusterError, match="503"):
        await replica(records, pip).python(PIP)
    assert (pip.waits, pip.runs) == (list(WAITS_S), len(WAITS_S) + 1)
    assert list(WAITS_S) == sorted(WAITS_S)
    assert records.failure() == InstallFailure("503", "n1", is_final=False)
