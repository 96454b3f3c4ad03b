"""Models of object stores are copied once a node, whole or not at all, and never deleted under their users."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest

from raytide.actors.models import remote_directory
from raytide.actors.models.model_cache import ModelCache, capacity_bytes, staged_model
from raytide.actors.models.remote_directory import RemoteDirectory, RemoteFile, _Copy
from raytide.core.errors import ConfigError, DataError, DeniedError, RaytideError, StorageError, WaitTimeoutError
from raytide.core.io.private_paths import ROOTS, restrict_to

ROOM = 10_000_000


@pytest.fixture(autouse=True)
def memory() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def put(name: str, **files: bytes) -> str:
    fs = fsspec.filesystem("memory")
    for file, content in {"config.json": b"{}", "model.safetensors": b"w" * 1000, **files}.items():
        fs.pipe_file(f"/{name}/{file}", content)
    return f"memory://{name}"


def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The URLs that are copied from now on."""
    seen: list[str] = []
    copy = RemoteDirectory.copy_to

    def counted(remote: RemoteDirectory, folder: Path, on_progress: Callable[[int, int], None]) -> None:
        seen.append(remote.url)
        copy(remote, folder, on_progress)

    monkeypatch.setattr(RemoteDirectory, "copy_to", counted)
    return seen


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_engines_read_is_copied_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_directory, "_PIECE_BYTES", 7)
    weights = bytes(range(256)) * 3
    files = {"model.safetensors": weights, "1_Pooling/config.json": b"{ }", "pytorch_model.bin": b"x", "empty.txt": b""}
    url = put("m", **{**files, ".git/config.json": b"x", "deep/er/config.json": b"x", "sub/w.safetensors": b"x"})
    seen: list[tuple[int, int]] = []
    staged = ModelCache(tmp_path, ROOM).stage(url, lambda done, total: seen.append((done, total)))
    home = Path(staged.path)
    assert names(home) == {"config.json", "model.safetensors", "1_Pooling/config.json", "empty.txt"}
    assert (home / "model.safetensors").read_bytes() == weights
    assert staged.bytes == len(weights) + 5
    assert all(done <= total == staged.bytes for done, total in seen)
    assert not list(tmp_path.glob("*.part"))


def test_it_is_copied_once_until_its_content_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied, cache, url = copies(monkeypatch), ModelCache(tmp_path, ROOM), put("m")
    first, second = cache.stage(url), cache.stage(url)
    assert (first.path, second.bytes, len(copied)) == (second.path, 0, 1)
    put("m", **{"model.safetensors": b"v" * 1000})
    assert cache.stage(url).path != first.path
    assert len(copied) == 2


def test_stagings_at_the_same_time_share_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied, url = copies(monkeypatch), put("m")
    with ThreadPoolExecutor(6) as pool:
        staged = list(pool.map(lambda _: ModelCache(tmp_path, ROOM).stage(url), range(6)))
    assert len({each.path for each in staged}) == len(copied) == 1
    assert sum(each.bytes > 0 for each in staged) == 1


KILLED = """
import sys, time
from pathlib import Path
import fsspec
from raytide.actors.models import remote_directory
from raytide.actors.models.model_cache import ModelCache
fs = fsspec.filesystem("memory")
fs.pipe_file("/m/config.json", b"{}")
fs.pipe_file("/m/model.safetensors", b"w" * 100)
piece = remote_directory._Copy._piece
remote_directory._digest = lambda url, files: "ab" * 16
def slow(copy, name, start):
    piece(copy, name, start)
    if name == "config.json":
        print("half", flush=True)
    time.sleep(3600)
remote_directory._Copy._piece = slow
ModelCache(Path(sys.argv[1]), 10**7).stage("memory://m")
"""


def test_a_killed_staging_leaves_nothing_that_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the same content: the parent's key is that of the killed process."""
    url = put("m")
    monkeypatch.setattr(remote_directory, "_digest", lambda url, files: "ab" * 16)
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    (torn,) = tmp_path.glob("*.part")
    waiting = threading.Thread(target=lambda: ModelCache(tmp_path, ROOM).stage(url))
    waiting.start()
    time.sleep(0.3)
    assert waiting.is_alive(), "the entry is locked while it is copied"
    process.kill()
    process.wait(20)
    waiting.join(20)
    home = Path(ModelCache(tmp_path, ROOM).stage(url).path)
    assert (home / "model.safetensors").read_bytes() == b"w" * 1000
    assert not torn.exists()


def test_what_was_not_used_for_the_longest_time_leaves_first(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path, 2500)
    old, used = cache.stage(put("a")), cache.stage(put("b"))
    old.close()
    used.close()
    for staged, age_s in ((old, 100), (used, 200)):
        at_s = time.time() - age_s
        os.utime(f"{staged.path}.lock", (at_s, at_s))
    again = cache.stage("memory://b")  # it is the youngest now
    again.close()
    in_use = cache.stage(put("c"))
    assert (Path(old.path).exists(), Path(used.path).exists(), Path(in_use.path).exists()) == (False, True, True)
    assert not Path(f"{old.path}.lock").exists()


def test_what_is_in_use_stays(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path, 2500)
    kept = [cache.stage(put("a")), cache.stage(put("b"))]
    with pytest.raises(StorageError, match="models in use"):
        cache.stage(put("c"))
    assert all(names(Path(each.path)) for each in kept)
    kept[0].close()
    assert cache.stage("memory://c").bytes
    assert not Path(kept[0].path).exists()


def test_a_model_larger_than_the_cache_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = copies(monkeypatch)
    with pytest.raises(StorageError, match="RAYTIDE_MODEL_CACHE_GB"):
        ModelCache(tmp_path, 500).stage(put("m"))
    assert copied == []


def test_a_model_that_changes_while_it_is_copied_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, copy = put("m"), RemoteDirectory.copy_to

    def changed(remote: RemoteDirectory, folder: Path, on_progress: Callable[[int, int], None]) -> None:
        copy(remote, folder, on_progress)
        put("m", **{"model.safetensors": b"other"})

    monkeypatch.setattr(RemoteDirectory, "copy_to", changed)
    with pytest.raises(DataError, match="changed while it was read"):
        ModelCache(tmp_path, ROOM).stage(url)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"] * 2


def test_a_file_with_fewer_bytes_than_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs = fsspec.filesystem("memory")
    whole = type(fs).cat_file
    monkeypatch.setattr(type(fs), "cat_file", lambda *args, **kwargs: whole(*args, **kwargs)[:1])
    with pytest.raises(DataError, match="has fewer bytes than the"):
        ModelCache(tmp_path, ROOM).stage(put("m"))


def test_a_store_that_falls_silent_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_directory, "STALL_S", 0.3)
    ended = threading.Event()
    url, fs = put("m"), fsspec.filesystem("memory")
    for call in ("cat_file", "ls"):
        with monkeypatch.context() as patch:
            patch.setattr(type(fs), call, lambda *args, **kwargs: ended.wait(20))
            with pytest.raises(WaitTimeoutError, match=r"nothing arrived for 0\.3 s"):
                ModelCache(tmp_path, ROOM).stage(url)
    ended.set()


class SteadyStore:
    """A store that sends `bytes_per_s` to a thread. Time passes only while it sends."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self.now_s = bytes_per_s, 0.0
        self.parts: list[tuple[int, float]] = []
        """The bytes and the seconds of each part."""

    def monotonic(self) -> float:
        return self.now_s

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        self.now_s += (end - start) / self._bytes_per_s
        self.parts.append((end - start, (end - start) / self._bytes_per_s))
        return bytes(end - start)


@pytest.mark.parametrize(("bytes_per_s", "largest"), [(1e9, 8 << 20), (2e6, 1 << 20), (60e3, 128 << 10)])
def test_a_slow_store_sends_small_parts_and_is_not_taken_for_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_per_s: float, largest: int
) -> None:
    store, size = SteadyStore(bytes_per_s), 40 << 20
    monkeypatch.setattr(remote_directory, "time", store)
    files = {"w.safetensors": RemoteFile("w", size, ""), "empty.txt": RemoteFile("e", 0, "")}
    copy = _Copy(store, RemoteDirectory("memory://m", files, ""), tmp_path)  # type: ignore[arg-type]
    copy.run()
    assert copy.error is None and copy.done == (tmp_path / "w.safetensors").stat().st_size == size
    assert (tmp_path / "empty.txt").exists()
    assert max(store.parts)[0] == largest
    assert max(took_s for _, took_s in store.parts) < remote_directory.STALL_S / 10


@pytest.mark.parametrize("name", ["/m/../../x.json", "/elsewhere/config.json", "/m/a\nb.json"])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    url, fs = put("m"), fsspec.filesystem("memory")
    monkeypatch.setattr(type(fs), "ls", lambda *args, **kwargs: [{"name": name, "size": 1, "type": "file"}])
    with pytest.raises(DataError, match="Names must stay in the folder"):
        ModelCache(tmp_path, ROOM).stage(url)


def test_a_folder_with_too_many_entries_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_directory, "MOST_ENTRIES", 3)
    with pytest.raises(DataError, match="more than 3 entries"):
        ModelCache(tmp_path, ROOM).stage(put("m", a=b"1", b=b"2", c=b"3"))


def test_errors_name_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, fs = ModelCache(tmp_path, ROOM), fsspec.filesystem("memory")
    with pytest.raises(DataError, match=r"memory://none does not exist"):
        cache.stage("memory://none")
    fs.pipe_file("/data/rows.txt", b"x")
    with pytest.raises(DataError, match="not a model directory"):
        cache.stage("memory://data")

    def denied(*args: object, **kwargs: object) -> bytes:
        raise PermissionError("no access to this key")

    monkeypatch.setattr(type(fs), "cat_file", denied)
    with pytest.raises(DataError, match=r"memory://m: .*PermissionError: no access"):
        cache.stage(put("m"))


def test_a_store_needs_an_allowed_url_within_the_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    assert staged_model("/models/a").path == staged_model("file:///models/a").path == "/models/a"
    for url in ("http://127.0.0.1/m", "memory://m", "simplecache::s3://b/m", "s3://key:secret@b/m"):
        with pytest.raises(DataError):
            staged_model(url)
    monkeypatch.setenv(ROOTS, "")
    restrict_to(["s3://ours/models"])
    with pytest.raises(DeniedError, match="outside the data roots"):
        staged_model("s3://theirs/models/a")


def test_the_capacity_is_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYTIDE_MODEL_CACHE_GB", "1.5")
    assert capacity_bytes() == 1_500_000_000
    monkeypatch.setenv("RAYTIDE_MODEL_CACHE_GB", "much")
    with pytest.raises(ConfigError):
        capacity_bytes()
    monkeypatch.delenv("RAYTIDE_MODEL_CACHE_GB")
    assert capacity_bytes() > 0


@pytest.mark.usefixtures("aws")
def test_equal_models_of_two_buckets_share_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    store = boto3.client("s3")
    for bucket in ("one", "two"):
        store.create_bucket(Bucket=bucket)
        for name, content in {"config.json": b"{}", "model.safetensors": b"w" * 1000}.items():
            store.put_object(Bucket=bucket, Key=f"models/a/{name}", Body=content)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    copied = copies(monkeypatch)
    first, second = staged_model("s3://one/models/a"), staged_model("s3://two/models/a/")
    assert (first.path, copied) == (second.path, ["s3://one/models/a"])
    assert (Path(first.path) / "model.safetensors").read_bytes() == b"w" * 1000
    with pytest.raises(RaytideError, match=r"s3://three/models/a"):
        staged_model("s3://three/models/a")
