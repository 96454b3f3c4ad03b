"""Sends requests to the operator's own machines through the OpenSSH client.

Host keys are always checked, and ssh never prompts for input. All requests to one machine share one connection
(ControlMaster), which closes soon after its last use.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from raytide.core.errors import ClusterError, ProviderError, from_json
from raytide.core.io.private_folder import private_folder
from raytide.core.objects.hardware.host import Host, HostsSection

AGENT = "raytide.autoscaler.providers.hosts.agent"
_SSH_FAILED = 255
_NOT_FOUND = (126, 127)
_CONNECT_S, _PERSIST_S = 10, 60
_HINTS = {
    "Host key verification failed": "Add its key to hosts.ssh.known_hosts, after comparing it on the machine itself "
    "(`ssh-keyscan -p PORT ADDRESS`, `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub`).",
    "Permission denied": "Put the public key of hosts.ssh.key into the user's ~/.ssh/authorized_keys there.",
    "Connection refused": "Start sshd there, or correct its port.",
    "timed out": "Is it switched on, and its address right? `power_on` of hosts can switch it on.",
    "No route to host": "Is it switched on, and its address right? `power_on` of hosts can switch it on.",
    "Could not resolve": "Correct its address.",
}


class HostConnection(Protocol):
    """The interface for requests to machines. A call raises ClusterError if the machine cannot be reached, and
    ProviderError if the machine refuses.
    """

    def request(self, host: Host, verb: str, content: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Sends a request to the machine's agent and returns the agent's answer."""

    def close(self) -> None:
        """Closes the connections to all machines."""


def agent_command(hosts: HostsSection) -> str:
    """Returns the shell command that starts the agent on a machine. The command is run once for every request."""
    return f"exec {hosts.python} -m {AGENT}"


def _ip_of(host: Host) -> str:
    """Returns the machine's IPv4 address as the head resolves it: on the machine itself its name is often 127.0.1.1."""
    try:
        return socket.gethostbyname(host.address)
    except OSError as error:
        raise ClusterError(
            f"host {host.name}: {host.address} has no IPv4 address: {error}.", hint=_HINTS["Could not resolve"]
        ) from None


class SshConnection:
    """The ssh connections from one process to the machines of a cluster."""

    def __init__(self, hosts: HostsSection, cluster_id: str) -> None:
        self._hosts = hosts
        self._control_dir = private_folder(
            "ssh", hashlib.sha256(f"{cluster_id} {os.getpid()}".encode()).hexdigest()[:8]
        )
        self._used: dict[str, Host] = {}

    def request(self, host: Host, verb: str, content: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        body = {**content, "verb": verb, "host": host.name, "address": _ip_of(host)}
        output = self.run(host, agent_command(self._hosts), json.dumps(body), timeout_s=timeout_s)
        try:
            answer: dict[str, Any] = json.loads((output.strip().splitlines() or [""])[-1])
        except ValueError:
            raise ProviderError(
                f"host {host.name}: {verb} was answered with {output.strip()[-200:]!r}.",
                hint="Its shell must print nothing for a command (see ~/.bashrc there).",
            ) from None
        if error := answer.get("error"):
            known = from_json(error)
            raise ProviderError(f"host {host.name}: {known.message}", hint=known.hint)
        return answer

    def run(self, host: Host, command: str, text: str = "", *, timeout_s: float) -> str:
        """Runs a shell command on the machine, with `text` on its stdin, and returns its output."""
        argv = [*self._argv(host), "--", host.address, command]
        self._used[host.name] = host
        try:
            done = subprocess.run(
                argv, input=text, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
            )
        except FileNotFoundError:
            raise ClusterError("there is no ssh here.", hint="Install OpenSSH's client.") from None
        except subprocess.TimeoutExpired:
            raise ClusterError(
                f"host {host.name} ({host.address}) did not answer within {timeout_s:g} s.", hint=_HINTS["timed out"]
            ) from None
        if done.returncode == 0:
            return done.stdout
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1].strip()
        if done.returncode == _SSH_FAILED:
            hint = next((hint for text, hint in _HINTS.items() if text in done.stderr), "Try `ssh` by hand.")
            raise ClusterError(f"host {host.name} ({host.address}) cannot be reached: {said}.", hint=hint)
        if done.returncode in _NOT_FOUND or "No module named" in said:
            raise ProviderError(
                f"host {host.name}: {self._hosts.python} has no raytide: {said}.",
                hint="Install raytide there, or correct hosts.python (docs/providers.md).",
            )
        raise ProviderError(f"host {host.name}: {said}", hint=f"`raytide doctor {host.name}` shows what it lacks.")

    def close(self) -> None:
        for host in self._used.values():
            argv = [*self._argv(host), "-O", "exit", "--", host.address]
            subprocess.run(argv, capture_output=True, timeout=_CONNECT_S, check=False)  # fails if none is open
        self._used = {}
        shutil.rmtree(self._control_dir, ignore_errors=True)

    def _argv(self, host: Host) -> Sequence[str]:
        ssh = self._hosts.ssh
        options = {
            "BatchMode": "yes",
            "StrictHostKeyChecking": "yes",
            "UserKnownHostsFile": f'"{Path(ssh.known_hosts).expanduser()}"',
            "GlobalKnownHostsFile": "/dev/null",
            "IdentitiesOnly": "yes",
            "ForwardAgent": "no",
            "ClearAllForwardings": "yes",
            "ConnectTimeout": _CONNECT_S,
            "ServerAliveInterval": 5,
            "ServerAliveCountMax": 3,
            "ControlMaster": "auto",
            "ControlPersist": _PERSIST_S,
            "ControlPath": f'"{self._control_dir}/%C"',
            "LogLevel": "ERROR",
        }
        flags = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
        who = ["-i", str(Path(ssh.key).expanduser()), "-p", str(host.port or ssh.port), "-l", host.user or ssh.user]
        return ["ssh", "-F", "none", "-T", *flags, *who]
