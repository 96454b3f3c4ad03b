"""Prints a description of the machine on which it runs, as one JSON object.

Run as `python - PORTS`, with this file on stdin.

The program changes nothing on the machine. It needs only Python, so it runs even where raytide is not installed. PORTS
is a JSON list of `host:port` addresses to which the program tries to connect.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from typing import Any

_COMMAND_S = 20
PODMAN_DRIVER = ["podman", "info", "--format", "{{.Store.GraphDriverName}}"]
GPU_QUERIES = {
    "gpus": "index,name,driver_version,temperature.gpu",
    "ecc": "index,ecc.errors.uncorrected.volatile.total",
    "slowdown": "index,clocks_throttle_reasons.hw_slowdown",
}
"""Fields of nvidia-smi in groups: if a driver does not know one field, it returns nothing for the whole group."""


def describe(ports: list[str]) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "time_s": time.time(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "versions": {name: _version(name) for name in ("raytide", "ray", "torch")},
        "free_bytes": {path: shutil.disk_usage(path).free for path in {os.path.expanduser("~"), tempfile.gettempdir()}},
        "shm_bytes": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,  # nosec B108
        "limits": {
            "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "locked memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
            "processes": resource.getrlimit(resource.RLIMIT_NPROC)[0],
        },
        "cpus": os.cpu_count() or 0,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "ports": {port: _connect(port) for port in ports},
        "nccl": _nccl(),
        "podman": (_lines(["podman", "--version"]) or [""])[0],
        "podman_driver": (_lines(PODMAN_DRIVER) or [""])[0],
        "is_root": os.geteuid() == 0,
        "xids": _xids(),
    }
    for name, fields in GPU_QUERIES.items():
        facts[name] = _lines(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    return facts


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _connect(port: str) -> str:
    """Returns an empty string if something answers at the address, else the error."""
    host, _, number = port.rpartition(":")
    try:
        socket.create_connection((host, int(number)), timeout=5).close()
    except OSError as error:
        return str(error)
    return ""


def _nccl() -> str:
    """Returns the version of NCCL's Python package, else of the system's library; empty without either."""
    for cuda in ("cu13", "cu12"):
        if found := _version(f"nvidia-nccl-{cuda}"):
            return found
    try:
        number = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    return f"{number.value // 10000}.{number.value % 10000 // 100}.{number.value % 100}"


def _xids() -> list[str] | None:
    """Returns the kernel's last messages of GPU faults; None if this user may not read them."""
    lines = _lines(["dmesg"])
    return None if lines is None else [line for line in lines if re.search(r"NVRM: Xid", line)][-5:]


def _lines(command: list[str]) -> list[str] | None:
    """Returns the output of a command; None if it fails or does not exist."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(describe(json.loads(sys.argv[1]))) + "\n")
