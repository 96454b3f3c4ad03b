"""Packages of trainings and endpoints: the same words as for scripts, installed by content, refused where they cannot
work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest
from tests.actors.engine.tiny import save_llama
from tests.actors.gang.test_packages import write_wheel

from raytide.actors.gang import packages
from raytide.actors.gang.packages import interpreter_with, keep_own
from raytide.actors.serving.engine_child import EngineChild
from raytide.actors.trainer.runners.local import train_local
from raytide.core.errors import ClusterError, ConfigError, DeniedError, RaytideError
from raytide.core.objects.cluster_config import RaytideSection
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.specs.train import TrainSpec

TRAIN = {"dataset": "/data", "out": "/out", "steps": 1}


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pip that knows only the wheels of a folder, and environments below it."""
    for version in ("1.0", "2.0"):
        write_wheel(tmp_path / "wheels", version)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setattr(packages, "private_folder", lambda name: tmp_path)
    monkeypatch.setattr(packages, "_IN_USE", {})


def where(python: str) -> str:
    command = [python, "-c", "import tidelib, numpy; print(tidelib.WHERE)"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.strip()


def test_the_python_of_an_environment_is_made_once_by_content(
    wheels: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first = interpreter_with(["tidelib==1.0"])
    assert where(first) == "1.0"
    assert where(interpreter_with(["tidelib==2.0"])) == "2.0"

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it is there already")

    monkeypatch.setattr(packages, "_make", never)
    assert interpreter_with(["tidelib==1.0"]) == first
    assert interpreter_with([]) == sys.executable
    assert "installing" not in capfd.readouterr().out


def test_an_environment_is_kept_by_the_process_that_runs_in_it(wheels: None, tmp_path: Path) -> None:
    python = interpreter_with(["tidelib==1.0"])
    for handle in packages._IN_USE.values():
        packages.os.close(handle)
    long_after_s = 1e12
    keep = "from raytide.actors.gang.packages import keep_own; keep_own(); print('kept', flush=True); input()"
    with subprocess.Popen([python, "-c", keep], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "kept\n"
        packages.remove_old(tmp_path, long_after_s)
        assert Path(python).exists()
        process.communicate("\n", timeout=300)
    packages.remove_old(tmp_path, long_after_s)
    assert not Path(python).exists()
    keep_own()  # this process runs in no environment of these


def test_what_cannot_be_installed_is_named_with_pips_error(wheels: None) -> None:
    for _ in range(2):  # what was begun is no environment
        with pytest.raises(
            ConfigError, match=r"the packages tidelib==3.0 cannot be installed on .*: ERROR: No matching"
        ):
            interpreter_with(["tidelib==3.0"])


@pytest.fixture
def index() -> Iterator[Callable[[int], str]]:
    """`index(status)`: the URL of a package index that answers each request with that status."""
    servers: list[ThreadingHTTPServer] = []

    def begin(status: int) -> str:
        class Answers(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Answers))
        Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/simple"

    yield begin
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "error", "why"),
    [
        (404, ConfigError, "ERROR: No matching distribution found for tidelib==3.0"),
        (502, ClusterError, "502 Server Error"),
        (503, ClusterError, "503"),
        (429, ClusterError, "429 Client Error"),
        (None, ClusterError, "Connection refused"),
    ],
)
def test_an_index_that_fails_is_told_from_a_package_that_it_lacks(
    wheels: None,
    index: Callable[[int], str],
    monkeypatch: pytest.MonkeyPatch,
    status: int | None,
    error: type[RaytideError],
    why: str,
) -> None:
    """pip prints the same error for both."""
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", index(status) if status else "http://127.0.0.1:9/simple")
    with pytest.raises(error, match=f"the packages tidelib==3.0 cannot be installed on .*{why}"):
        interpreter_with(["tidelib==3.0"])


@pytest.mark.parametrize("packages_", [["-r x"], ["tidelib @ https://ana:hush@host/t.whl"]])
def test_specs_take_requirements_and_no_options(packages_: Sequence[str]) -> None:
    for parse, fields in ((TrainSpec.parse, TRAIN), (ServeSpec.parse, {"name": "m", "model": "/m"})):
        assert parse({**fields, "pip": [" peft==0.17 "]}, where="x").pip == ("peft==0.17",)
        with pytest.raises(ConfigError, match="pip") as refused:
            parse({**fields, "pip": packages_}, where="x")
        assert "hush" not in str(refused.value)


@pytest.mark.asyncio
async def test_the_engine_of_a_replica_runs_in_that_python_or_does_not_start(wheels: None, tmp_path: Path) -> None:
    save_llama(tmp_path / "model")
    engine = {"kind": "native", "num_blocks": 32, "device": "cpu"}
    spec = ServeSpec(name="tiny", model=str(tmp_path / "model"), engine=engine, pip=("tidelib==1.0",))
    phases: list[str] = []
    child = await EngineChild.start(spec, "127.0.0.1", "r", model_dir=spec.model, on_phase=phases.append)
    try:
        assert phases == ["install", "load", "warm-up"]
        assert psutil.Process(child._process.pid).cmdline()[0] == interpreter_with(spec.pip)
        assert (await child.engine.stats()).generated_tokens == 1
    finally:
        await child.stop(1.0)
    spec = spec.model_copy(update={"pip": ("tidelib==3.0",)})
    with pytest.raises(ConfigError, match=r"the packages tidelib==3.0 cannot be installed"):
        await EngineChild.start(spec, "127.0.0.1", "r", model_dir=spec.model)


def test_packages_that_would_run_as_raytide_are_refused_where_run_as_separates_users() -> None:
    settings = RaytideSection(node_types={}, run_as="nobody")
    settings.check_packages((), "default", "train job t")
    with pytest.raises(DeniedError, match="train job t: the packages peft would run as raytide's user"):
        settings.check_packages(("peft",), "default", "train job t")
    RaytideSection(node_types={}).check_packages(("peft",), "default", "train job t")


def test_packages_are_refused_where_they_cannot_work() -> None:
    with pytest.raises(ConfigError, match="pip is for jobs of a cluster"):
        train_local(TrainSpec.parse({**TRAIN, "pip": ["peft"]}, where="train"))
    with pytest.raises(ConfigError, match="pip is for replicas of one member"):
        ServeSpec.parse({"name": "m", "model": "/m", "members": 2, "pip": ["peft"]}, where="serve")
