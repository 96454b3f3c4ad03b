"""The page is open and holds no data; what fills it needs a token."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from raytide.dashboards.web import bundle, stream

WEB = Path(bundle.__file__).parent
NOBODY = {"Authorization": ""}


def test_the_page_is_open_and_allows_nothing_from_elsewhere(client: TestClient) -> None:
    page = client.get("/", headers=NOBODY)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert page.headers["cache-control"] == "no-cache"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r'(src|href)="(?!/page/)', page.text)


def test_files_with_a_hash_in_their_name_are_kept_for_ever(client: TestClient) -> None:
    names = re.findall(r'(?:src|href)="(/page/[^"]+)"', client.get("/", headers=NOBODY).text)
    assert len(names) == 4
    for name in names:
        file = client.get(name, headers=NOBODY)
        assert file.status_code == 200
        is_hashed = re.search(r"-[0-9a-f]{10}\.(js|css)$", name) is not None
        assert ("immutable" in file.headers["cache-control"]) is is_hashed
        assert file.headers["content-security-policy"]
    assert sum("icon" not in name for name in names) == 3


def test_files_are_compressed_and_not_sent_twice(client: TestClient) -> None:
    plain = client.get("/", headers={**NOBODY, "Accept-Encoding": "identity"})
    packed = client.get("/", headers={**NOBODY, "Accept-Encoding": "gzip"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert plain.content == packed.content
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"])
    again = client.get("/", headers={**NOBODY, "If-None-Match": plain.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["none.js", "../api.py", "%2e%2e/bundle.py", "index.html/x", "licences"])
def test_there_are_no_other_files(client: TestClient, path: str) -> None:
    assert client.get(f"/page/{path}", headers=NOBODY).status_code in (401, 404)


@pytest.mark.parametrize("path", ["stream", "tide", "fleet?at_s=1", "ledger", "jobs/job-1/metrics"])
def test_data_needs_a_token(client: TestClient, path: str) -> None:
    assert client.get(f"/v1/{path}", headers=NOBODY).status_code == 401


def test_the_stream_says_who_listens_and_shows_everything_once(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.post("/v1/jobs", json={"kind": "gang", "name": "mine", "gang": {"resources": {"CPU": 1}}})
    for longest_s in (1.0, 30.0):  # on a busy machine, the first picture takes its time
        monkeypatch.setattr(stream, "LONGEST_S", longest_s)
        answer = client.get("/v1/stream", headers={"Authorization": "Bearer secret"})
        if "event: status\n" in answer.text:
            break
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert "content-length" not in answer.headers
    events = [part.split("\n") for part in answer.text.split("\n\n") if part.startswith("event")]
    told = {head.removeprefix("event: "): json.loads(data.removeprefix("data: ")) for head, data in events}
    assert (told["hello"]["user"], told["hello"]["team"]) == ("ana", "default")
    assert told["hello"]["page"] == bundle.version()
    assert [row["name"] for row in told["jobs"]["rows"].values()] == ["mine"]
    assert "plan" not in told["status"]


def test_what_is_vendored_has_its_licence() -> None:
    packages = json.loads((WEB / "package.json").read_text())["devDependencies"]
    for name in ("preact", "uplot"):
        text = (WEB / "static" / "licences" / f"{name}.txt").read_text()
        assert text.startswith(f"{name} {packages[name]}\nSPDX-License-Identifier: MIT\n")
        assert "Permission is hereby granted" in text


def test_the_lock_names_no_registry() -> None:
    assert '"resolved"' not in (WEB / "package-lock.json").read_text()


@pytest.mark.client
def test_the_committed_page_is_what_its_source_builds(tmp_path: Path) -> None:
    if shutil.which("node") is None or not (WEB / "node_modules" / "esbuild").is_dir():
        pytest.skip("node or the page's packages are missing: `./dev page` installs them")
    subprocess.run(["node", "build.mjs", str(tmp_path)], cwd=WEB, check=True, timeout=120)
    built = {file.relative_to(tmp_path): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    static = WEB / "static"
    committed = {file.relative_to(static): file.read_bytes() for file in static.rglob("*") if file.is_file()}
    assert {name.as_posix() for name in built} == {name.as_posix() for name in committed}
    assert [name.as_posix() for name in built if built[name] != committed[name]] == []


def test_compressed_files_are_the_files() -> None:
    for file in bundle.bundle().values():
        assert gzip.decompress(file.compressed) == file.body
