"""Packages that were uploaded: which of them stay."""

from __future__ import annotations

import io
import os
import time
import zipfile
from pathlib import Path

import pytest

from raytide.control import packages as module
from raytide.control.packages import Packages
from raytide.core.errors import DataError, StorageError
from raytide.core.package import digest_of


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packages:
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    monkeypatch.setattr(module, "TOTAL_BYTES", 3000)
    return Packages(tmp_path / "packages")


def keep(packages: Packages, noise: bytes, used_s_ago: float) -> Path:
    """A package of about 900 bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("noise", noise * 800)
    body = buffer.getvalue()
    with packages.receive(digest_of(body)) as part:
        part.write(body)
    path = packages.path(digest_of(body))
    at_s = time.time() - used_s_ago
    os.utime(path, (at_s, at_s))
    return path


def test_what_was_used_longest_ago_makes_room_unless_a_job_still_needs_it(packages: Packages) -> None:
    needed, unused, newest = (keep(packages, name, ago) for name, ago in ((b"a", 300.0), (b"b", 200.0), (b"c", 100.0)))
    packages.make_room({needed.stem})
    assert [path.exists() for path in (needed, unused, newest)] == [True, False, True]


def test_what_nobody_used_for_a_month_goes_unless_a_job_still_needs_it(packages: Packages) -> None:
    needed, unused = (keep(packages, name, module.KEPT_S + 60.0) for name in (b"a", b"b"))
    packages.make_room({needed.stem})
    assert [path.exists() for path in (needed, unused)] == [True, False]


def test_no_room_is_made_at_the_cost_of_jobs(packages: Packages) -> None:
    needed = {keep(packages, name, 0.0) for name in (b"a", b"b", b"c")}
    with pytest.raises(StorageError, match="jobs that are not over"):
        packages.make_room({path.stem for path in needed})
    assert all(path.exists() for path in needed)


def test_what_is_no_zip_file_is_refused_when_it_arrives(packages: Packages) -> None:
    with pytest.raises(DataError, match="no zip file"), packages.receive(digest_of(b"files")) as part:
        part.write(b"files")
