"""Own machines for tests: real sshd processes of this user, each on an address of its own, 127.0.K.N."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from raytide.autoscaler.providers.local.files import MARK
from raytide.control.bootstrap.loopback import claim
from raytide.core.io.process import kill_marked, marked

TOOLS = Path(sys.prefix) / "tools" / "bin"
PLATFORM = Path(__file__).parents[1] / "platform"
SESSION = "RAYTIDE_TEST_SESSION"
PORT = 2222


def find_sshd() -> str:
    found = shutil.which("sshd", path=os.pathsep.join([str(TOOLS), os.environ["PATH"]]))
    if found is None or shutil.which("ssh-keygen") is None:
        pytest.skip("there is no sshd here: `./dev setup` fetches it (Debian: openssh-server)")
    return found


@dataclass(slots=True)
class SshdHosts:
    """Machines h1, h2, ... of one K. `stop` pulls the plug of one's sshd; what runs there goes on."""

    folder: Path
    k: int
    enter: Callable[[str], list[str]]
    """Returns the words before a command that runs on the machine of an address, in its network."""
    sshds: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def address(self, n: int) -> str:
        return f"127.0.{self.k}.{n + 1}"

    def home(self, n: int) -> Path:
        return self.folder / f"h{n}"

    def start(self, n: int, **environment: str) -> None:
        """Starts the sshd of machine N, whose sessions have these variables."""
        home = self.home(n)
        home.mkdir(exist_ok=True)
        if not (home / "host_key").exists():
            _keygen(home / "host_key")
            key = " ".join((home / "host_key.pub").read_text().split()[:2])
            with (self.folder / "known_hosts").open("a") as known:
                known.write(f"[{self.address(n)}]:{PORT} {key}\n")
        here = {
            "PYTHONPATH": str(PLATFORM),
            "RAYTIDE_HOME": str(home / "raytide"),
            SESSION: os.environ[SESSION],
            **environment,
        }
        user = pwd.getpwuid(os.getuid())
        lines = [f"{user.pw_name}:x:{user.pw_uid}:{user.pw_gid}::{home}:/bin/sh"]
        lines += [f"{name}:x:65534:65534::/usr/sbin:/usr/sbin/nologin" for name in ("sshd", "sbin")]
        (home / "passwd").write_text("\n".join(lines) + "\n")
        settings = {
            "ListenAddress": f"{self.address(n)}:{PORT}",
            "HostKey": home / "host_key",
            "AuthorizedKeysFile": self.folder / "user_key.pub",
            "PidFile": "none",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "StrictModes": "no",
            "Subsystem": "sftp internal-sftp",
            "SetEnv": " ".join(f'{name}="{value}"' for name, value in here.items()),
        }
        (home / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        names = {"NSS_WRAPPER_PASSWD": str(home / "passwd"), "NSS_WRAPPER_GROUP": "/etc/group"}
        with (home / "sshd.log").open("ab") as log:
            command = [*self.enter(self.address(n)), find_sshd(), "-f", str(home / "sshd_config"), "-D", "-e"]
            self.sshds[f"h{n}"] = subprocess.Popen(command, env={**os.environ, **names}, stdout=log, stderr=log)
        _wait_for(self.address(n), self.sshds[f"h{n}"], home / "sshd.log")

    def stop(self, n: int) -> None:
        """Ends the sshd and its open sessions."""
        sshd = self.sshds.pop(f"h{n}")
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(sshd.pid)], capture_output=True, text=True)
        sshd.kill()
        sshd.wait(10)
        for pid in children.stdout.split():
            with suppress(ProcessLookupError):  # it ended with its sshd
                os.kill(int(pid), 9)

    def section(self, *numbers: int, node_type: str = "own", **more: Any) -> dict[str, Any]:
        """Returns `metadata.raytide.hosts` with these machines."""
        machines = [{"name": f"h{n}", "address": self.address(n), "node_type": node_type} for n in numbers]
        user = pwd.getpwuid(os.getuid()).pw_name
        ssh = {"user": user, "port": PORT, "key": str(self.folder / "user_key")}
        ssh["known_hosts"] = str(self.folder / "known_hosts")
        return {"ssh": ssh, "python": sys.executable, "machines": machines, **more}

    def close(self) -> None:
        for n in [int(name[1:]) for name in self.sshds]:
            self.stop(n)
        for folder in self.folder.glob("h*/raytide/hosts/*/*/*"):
            kill_marked(MARK, str(folder.resolve()))
            assert marked(MARK, str(folder.resolve())) == []


@contextmanager
def sshd_hosts(folder: Path, enter: Callable[[str], list[str]] = lambda _: []) -> Iterator[SshdHosts]:
    find_sshd()
    k, held = claim({k: [(f"127.0.{k}.{n}", PORT) for n in (1,)] for k in range(200, 240)})
    folder.mkdir(parents=True, exist_ok=True)
    _keygen(folder / "user_key")
    hosts = SshdHosts(folder, k, enter)
    try:
        yield hosts
    finally:
        hosts.close()
        held.close()


def _keygen(path: Path) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _wait_for(address: str, sshd: subprocess.Popen[bytes], log: Path) -> None:
    while True:
        assert sshd.poll() is None, log.read_text()
        try:
            socket.create_connection((address, PORT), timeout=60).close()
        except ConnectionRefusedError:
            time.sleep(0.02)
            continue
        return
