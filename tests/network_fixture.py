"""A network of this test's own, in which each machine has a cable that can be pulled.

The network is a namespace of Linux, with a bridge. A machine is a further namespace, joined to the bridge by a pair of
virtual interfaces. All addresses are 127.N.N.N, as in clusters on one machine: `route_localnet` lets them through.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

CLONE_NEWNET = 0x40000000
BRIDGE = "bridge"
HUB = "127.1.0.1"
"""The source address of what the test's own namespace sends to a machine. A machine has 127.0.0.0/24 for itself."""
LONGEST_S = 30
OWN_ROUTES = """
ip link set lo up
sysctl -qw net.ipv4.conf.all.route_localnet=1
ip route del local 127.0.0.0/8 dev lo table local
ip route add local 127.0.0.0/24 dev lo table local
ip addr add {address}/32 dev eth0
ip link set eth0 up
ip route add 127.0.0.0/8 dev eth0 src {address}
"""


@dataclass(slots=True)
class PrivateNetwork:
    """Machines by their addresses. A process of the test's own namespace reaches all of them."""

    machines: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """A process that does nothing, for each namespace that it keeps."""

    def enter(self, address: str) -> list[str]:
        """Returns the words to put before a command, so that it runs on the machine, which is made if it is new."""
        if address not in self.machines:
            self._add(address)
        return ["nsenter", f"--net=/proc/{self.machines[address].pid}/ns/net"]

    def pull_cable(self, address: str) -> None:
        """Takes the machine off the network. No packet comes or goes, and no connection is closed."""
        _run(["ip", "link", "set", self._cable(address), "down"])

    def plug_in_cable(self, address: str) -> None:
        _run(["ip", "link", "set", self._cable(address), "up"])

    def close(self) -> None:
        for machine in self.machines.values():
            machine.kill()
            machine.wait(LONGEST_S)

    def _add(self, address: str) -> None:
        # `cat` ends with this process, which holds the other end of its pipe
        holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.machines[address] = holder
        assert holder.stdout is not None
        holder.stdout.readline()  # it has its namespace now
        here = self._cable(address)
        _run(["ip", "link", "add", here, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid)])
        _run(["ip", "link", "set", here, "master", BRIDGE, "up"])
        _run([*self.enter(address), "sh", "-ec", OWN_ROUTES.format(address=address)])
        _run(["ip", "route", "add", f"{address}/32", "dev", BRIDGE, "src", HUB, "table", "local"])

    def _cable(self, address: str) -> str:
        return f"cable-{address.rpartition('.')[2]}"


@contextmanager
def private_network() -> Iterator[PrivateNetwork]:
    """Puts this thread, and all that it starts, into a network namespace of its own for as long as the block lasts."""
    for program in ("ip", "unshare", "nsenter", "sysctl"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program} here (Debian: apt-get install iproute2 util-linux procps)")
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open(f"/proc/self/task/{_thread_id()}/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(CLONE_NEWNET) != 0:
            pytest.skip(f"no network namespace can be made here, which root can: {os.strerror(ctypes.get_errno())}")
        network = PrivateNetwork()
        try:
            _run(["sh", "-ec", f"ip link set lo up; ip link add {BRIDGE} type bridge; ip link set {BRIDGE} up"])
            _run(["sysctl", "-qw", *(f"net.ipv4.conf.{name}.route_localnet=1" for name in ("all", BRIDGE))])
            yield network
        finally:
            network.close()
            assert libc.setns(before, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    finally:
        os.close(before)


def _thread_id() -> int:
    return int(Path("/proc/thread-self").readlink().name)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
