"""Packages that were uploaded: which of them stay."""

from __future__ import annotations

import io
import os
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from raytide.control.api.services import uploads
from raytide.control.api.services.uploads import Packages
from raytide.core.errors import ConflictError, DataError, StorageError
from raytide.core.io.working_dir import digest_of


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packages:
    monkeypatch.setattr(uploads, "MOST_BYTES", 1000)
    monkeypatch.setattr(uploads, "TOTAL_BYTES", 3000)
    monkeypatch.setattr(uploads, "LEAST_BYTES", 0)
    return Packages(tmp_path / "packages")


def keep(packages: Packages, noise: bytes, used_s_ago: float) -> Path:
    """A package of about 900 bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("noise", noise * 800)
    body = buffer.getvalue()
    with packages.receive(digest_of(body)) as part:
        part.write(body)
        part.finish()
    path = packages.path(digest_of(body))
    at_s = time.time() - used_s_ago
    os.utime(path, (at_s, at_s))
    return path


def test_what_was_used_longest_ago_makes_room_unless_a_job_still_needs_it(packages: Packages) -> None:
    needed, unused, newest = (keep(packages, name, ago) for name, ago in ((b"a", 300.0), (b"b", 200.0), (b"c", 100.0)))
    packages.make_room({needed.stem})
    assert [path.exists() for path in (needed, unused, newest)] == [True, False, True]


def test_what_nobody_used_for_a_month_goes_unless_a_job_still_needs_it(packages: Packages) -> None:
    needed, unused = (keep(packages, name, uploads.KEPT_S + 60.0) for name in (b"a", b"b"))
    packages.make_room({needed.stem})
    assert [path.exists() for path in (needed, unused)] == [True, False]


def test_no_room_is_made_at_the_cost_of_jobs(packages: Packages) -> None:
    needed = {keep(packages, name, 0.0) for name in (b"a", b"b", b"c")}
    with pytest.raises(StorageError, match="packages of unfinished jobs"):
        packages.make_room({path.stem for path in needed})
    assert all(path.exists() for path in needed)


def test_what_is_no_zip_file_is_refused_when_it_arrives(packages: Packages) -> None:
    with packages.receive(digest_of(b"files")) as part:
        part.write(b"files")
        with pytest.raises(DataError, match="not a zip file"):
            part.finish()


def test_a_team_s_own_packages_make_room_for_its_next_and_nobody_else_s(
    packages: Packages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "TOTAL_BYTES", 100_000)
    monkeypatch.setattr(uploads, "TEAM_BYTES", 700)

    def put(name: bytes, team: str, used_s_ago: float) -> Path:
        body = b"PK\5\6" + bytes(16) + bytes([200, 0]) + name * 200
        with packages.receive(digest_of(body), team) as part:
            part.write(body)
            part.finish()
        path = packages.path(digest_of(body))
        os.utime(path, (time.time() - used_s_ago,) * 2)
        return path

    theirs = put(b"t", "blue", 900.0)
    needed, old, new = put(b"n", "red", 800.0), put(b"o", "red", 700.0), put(b"w", "red", 600.0)
    put(b"t", "red", 900.0)  # the same content again stays the first one's
    packages.make_room({needed.stem}, "red", 222)
    assert [path.exists() for path in (theirs, needed, old, new)] == [True, True, False, True]
    assert {path.stem for path in theirs.parent.iterdir()} == {path.stem for path in (theirs, needed, new)}
    with pytest.raises(ConflictError, match="unfinished jobs of team red"):
        packages.make_room({needed.stem, new.stem}, "red", 400)
    packages.make_room({needed.stem, new.stem}, "blue", 400)
    assert theirs.exists()


def test_a_package_that_the_disk_cannot_hold_is_refused_before_it_arrives(
    packages: Packages, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(packages, b"a", 0.0)
    monkeypatch.setattr(uploads.shutil, "disk_usage", lambda folder: SimpleNamespace(free=500))
    packages.make_room(set(), "red", 500)
    with pytest.raises(StorageError, match="no space left"):
        packages.make_room(set(), "red", 501)


def test_packages_of_a_few_bytes_do_not_fill_the_file_system(
    packages: Packages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "TOTAL_BYTES", 10**9)
    monkeypatch.setattr(uploads, "TEAM_BYTES", 10_000)
    monkeypatch.setattr(uploads, "LEAST_BYTES", 3000)
    for number in range(6):
        packages.make_room(set(), "evil", 30)
        body = b"PK\5\6" + bytes(16) + b"\2\0" + b"%02d" % number  # an empty archive with a comment
        with packages.receive(digest_of(body), "evil") as part:
            part.write(body)
            part.finish()
    assert len(list((packages.path(digest_of(body)).parent).glob("*.zip"))) == 4
