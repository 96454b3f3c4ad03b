"""The start of a gateway process."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

from raytide.core.io.process import free_port

SCRIPT = """
import sys, threading
from pathlib import Path
from raytide.gateway import __main__ as gateway
from raytide.gateway.tenancy.control_api import ControlApi
from raytide.gateway.tenancy.tenancy import Tenancy


class Directory:
    def __init__(self, address, on_change):
        self._on_change = on_change

    def start(self):
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        print("started", flush=True)
        sys.stdin.readline()
        self._on_change({})

    def stop(self):
        pass


gateway.Directory = Directory
nobody = Tenancy(ControlApi("http://127.0.0.1:9", "", "one"), requires_keys=False)
gateway.serve("", gateway.bound_socket("127.0.0.1", int(sys.argv[1])), "one", nobody, Path(sys.argv[2]))
"""


BROKEN = """
from raytide.gateway.tenancy.usage import UsageReporter


async def fail(self):
    raise ValueError("a bug")


UsageReporter._run = fail
"""


def test_a_gateway_that_cannot_report_usage_any_more_ends(tmp_path: Path) -> None:
    """It would answer without billing; the supervisor starts another one."""
    process = subprocess.Popen(
        [sys.executable, "-c", BROKEN + SCRIPT, "0", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, errors = process.communicate("\n", timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert "a bug" in errors


def test_a_gateway_accepts_no_connection_before_it_knows_which_endpoints_exist(tmp_path: Path) -> None:
    """It would answer that they do not exist, while the other process on the port knows them."""
    port = free_port()
    command = [sys.executable, "-c", SCRIPT, str(port), str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port)) != 0
        process.stdin.write("\n")
        process.stdin.flush()
        deadline = time.monotonic() + 120
        while True:
            try:
                answer = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=60.0)
                break
            except httpx.ConnectError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        assert answer.json()["data"] == []
    finally:
        process.kill()
        process.communicate()
