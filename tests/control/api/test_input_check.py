"""The API opens few of the files and URLs that specs name: nothing remote, nothing special, and never for long."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from tests.control.api.test_routes import GANG, client, clock, desk, error

from raytide.control.api.auth import Caller
from raytide.control.api.services import input_check
from raytide.control.api.services.input_check import check_file
from raytide.core.errors import DataError
from raytide.core.io.storage import check_url
from raytide.sizing import serving

__all__ = ["client", "clock", "desk"]

ROOT = {"Authorization": "Bearer root"}


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user of the machine can enter, as pytest's are not."""
    folder = Path(tempfile.mkdtemp(prefix="raytide-inputs-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def train(dataset: object, **config: object) -> dict[str, object]:
    return {**GANG, "kind": "train", "config": {"dataset": dataset, "out": "/out", "steps": 1, **config}}


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/x",
        "HTTPS://example.com/x",
        "simplecache::http://127.0.0.1/x",
        "s3://bucket/x::http://127.0.0.1/x",
        "/a::b",
        "zip://x.zip",
        "github://a:b@main/x",
        "ftp://host/x",
        "ssh://host/x",
        "memory://x",
        "data:text/plain,x",
        "reference://x",
        "s3://key:secret@bucket/x",
        "s3://bucket:9000/x",
        "gs://bucket/x?endpoint_url=http://127.0.0.1",
        "abfs://container@evil.example/x",
        "abfs://container@evil.example:80/x",
        "az://c@core.windows.net.evil.example/x",
        "://x",
    ],
)
def test_a_url_that_leads_elsewhere_is_refused(client: TestClient, url: str) -> None:
    with pytest.raises(DataError, match="Use a path"):
        check_url(url)
    data = {**GANG, "kind": "data", "gang": {"shapes": [{"resources": {"CPU": 1}}]}}
    for body in (
        train(url),
        train("/d", out=url),
        train("/d", checkpoint_dir=url),
        train("/d", init_from=url),
        train(None, chat={"file": url, "tokenizer": "/t"}),
        train(None, chat={"file": "/c", "tokenizer": url}),
        {**data, "config": {"inputs": ["/a", url], "out": "/out"}},
        {**data, "config": {"inputs": ["/a"], "out": url}},
        {**data, "config": {"inputs": ["/a"], "out": "/out", "tokenizer": {"file": url}}},
        *(
            {**data, "config": {"inputs": ["/a"], "out": "/out", "cleaning": cleaning}}
            for cleaning in (
                {"near_duplicates": {"against": [url]}},
                {"decontaminate": {"sets": [url]}},
                {"rules": {"perplexity": {"model": url, "max_perplexity": 1}}},
                {"sources": {"*": {"stages": [{"function": f"{url}.py:f"}]}}},
            )
        ),
    ):
        answer = client.post("/v1/jobs", json=body)
        assert (answer.status_code, error(answer)["code"]) == (400, "bad_data"), body
    answer = client.post("/v1/endpoints", json={"name": "m", "model": url})
    assert (answer.status_code, error(answer)["code"]) == (400, "bad_data")


@pytest.mark.parametrize(
    "url",
    [
        *(
            "/a/b",
            "a/b",
            "~/a",
            "file:///a",
            "s3://bucket/a?.txt",
            "gs://bucket/a@b:c/d",
            "hf://datasets/user/x@main/y",
        ),
        *("abfs://container@account.dfs.core.windows.net/x", "az://container/x", "s3a://bucket", "C:/x"),
    ],
)
def test_paths_and_plain_urls_of_object_stores_are_taken(url: str) -> None:
    check_url(url)


def test_nothing_remote_is_opened(client: TestClient) -> None:
    """A job whose dataset is in an object store is accepted; its driver says what is missing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        for url in (
            f"http://127.0.0.1:{port}/x",
            f"s3://127.0.0.1:{port}/x",
            f"simplecache::http://127.0.0.1:{port}/x",
        ):
            assert client.post("/v1/jobs", json=train(url)).status_code == 400
        assert client.post("/v1/jobs", json=train("s3://127.0.0.1/x")).status_code == 200
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize("where", ["check_file", "check_named"])
def test_submissions_to_a_file_system_that_hangs_stop_nobody(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    back = threading.Event()
    hanging = threading.Semaphore(0)

    def hangs(*_: object, **__: object) -> object:
        hanging.release()
        back.wait(60.0)
        return input_check._UNKNOWN

    for name in {"check_file", where}:
        monkeypatch.setattr(input_check, name, hangs)
    monkeypatch.setattr(input_check, "CHECK_TIMEOUT_S", 0.05)
    try:
        with ThreadPoolExecutor(41) as clients:
            answers = [clients.submit(client.post, "/v1/jobs", json=train("/hangs/here")) for _ in range(41)]
            assert hanging.acquire(timeout=60.0)
            assert client.get("/health").json()["ok"] is True
            assert client.get("/v1/jobs").status_code == 200
            assert {answer.result(60.0).status_code for answer in answers} == {200}, "the driver looks"
        if where == "check_named":
            assert client.post("/v1/endpoints", json={"name": "m", "model": "/hangs"}).status_code == 400
    finally:
        back.set()


@pytest.mark.parametrize("operator", [True, False])
def test_only_regular_files_are_opened(shared: Path, operator: bool) -> None:
    os.mkfifo(shared / "fifo")
    (shared / "link").symlink_to("/dev/zero")
    (shared / "loop").symlink_to("loop")
    for path in ("/dev/zero", "/dev/full", str(shared / "fifo"), str(shared / "link"), str(shared), "/proc/kmsg"):
        assert check_file(path, 100, for_everybody=not operator).content is None
    for path in (str(shared / "loop"), "a\0b", "x" * 5000, "/" + "y" * 300, str(shared / "fifo" / "x")):
        assert check_file(path, 100, for_everybody=not operator).content is None
    (shared / "large").write_bytes(b"x" * 101)
    (shared / "small").write_bytes(b"x" * 100)
    assert check_file(str(shared / "large"), 100, for_everybody=not operator) == input_check.FileCheck(size=101)
    assert check_file(str(shared / "small"), 100, for_everybody=not operator).content == b"x" * 100


def test_a_team_learns_nothing_of_files_that_only_the_operator_can_read(client: TestClient, shared: Path) -> None:
    closed = shared / "closed"
    closed.mkdir(mode=0o700)
    (closed / "secret").write_text("x")
    (closed / "manifest.json").write_text('{"version": "the secret"}')
    (closed / "config.json").write_text("{}")
    (shared / "link").symlink_to(closed)
    (shared / "manifest.json").write_text('{"version": "the secret"}')
    (shared / "manifest.json").chmod(0o600)
    for there, missing in (
        (train(str(closed)), train(str(closed / "none"))),
        (train(str(shared / "link")), train(str(shared / "link" / "none"))),
        [train(None, chat={"file": f"{closed}/{name}", "tokenizer": "/t"}) for name in ("secret", "none")],
    ):
        assert [client.post("/v1/jobs", json=body).status_code for body in (there, missing)] == [200, 200]
        assert client.post("/v1/jobs", json=missing, headers=ROOT).status_code == 400, "the operator is told"
    assert client.post("/v1/jobs", json=train(str(shared))).status_code == 200, "it cannot be read by everybody"
    assert client.post("/v1/jobs", json=train(str(shared)), headers=ROOT).status_code == 400
    for model in (str(closed), str(closed / "none")):
        assert client.post("/v1/endpoints", json={"name": "m", "model": model}).status_code == 200


def test_a_team_is_told_of_what_everybody_can_read(client: TestClient, shared: Path) -> None:
    answer = client.post("/v1/jobs", json=train(str(shared)))
    assert (answer.status_code, "is not a token dataset" in error(answer)["message"]) == (400, True)
    (shared / "manifest.json").write_text("{")
    answer = client.post("/v1/jobs", json=train(str(shared)))
    assert (answer.status_code, "is not JSON" in error(answer)["message"]) == (400, True)
    assert client.post("/v1/endpoints", json={"name": "m", "model": str(shared)}).status_code == 400
    (shared / "config.json").write_text("{}")
    assert client.post("/v1/endpoints", json={"name": "m", "model": str(shared)}).status_code == 200


def test_a_gguf_file_or_a_packaged_model_needs_no_directory(shared: Path) -> None:
    inputs, caller = input_check.Inputs(), Caller("root", "*")
    file = shared / "m.gguf"
    with pytest.raises(DataError, match=r"m\.gguf is not a GGUF file: it does not exist"):
        inputs.check_model(str(file), caller)
    file.write_bytes(b"GGUF")
    inputs.check_model(str(file), caller)
    inputs.check_model("smollm2", caller)
    with pytest.raises(DataError, match=r"is not a model directory: it has no config\.json"):
        inputs.check_model(str(shared), caller)
    with pytest.raises(DataError, match="is a GGUF file in a store"):
        inputs.check_model("s3://bucket/m.gguf", caller)


def test_a_model_that_its_part_of_a_gpu_does_not_hold_is_refused(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "gpu_memory_gb", lambda _: 35.0)
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(3 * 10**9)  # a hole: it takes no room
    body = {"name": "big", "model": str(tmp_path), "gpus": 0.1}
    refused = client.post("/v1/endpoints", json=body, headers=ROOT)
    says = "its weights (3 GB) and its KV cache (1 GB) need 4 GB; 0.1 GPU has at most 3.5 GB here"
    assert says in error(refused)["message"]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size": 9000000000}}')
    assert "(9 GB)" in error(client.post("/v1/endpoints", json=body, headers=ROOT))["message"]
    index.unlink()
    for fields in ({"gpus": 0.2}, {"engine": {"kv_memory_gb": 0.2}}):
        answer = client.post("/v1/endpoints", json={**body, **fields}, headers=ROOT)
        assert answer.status_code == 200, answer.text
