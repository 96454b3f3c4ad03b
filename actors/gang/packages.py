"""Packages of a job's or an endpoint's own, and a command that runs with them:
`python -m raytide.actors.gang.packages REQUIREMENTS COMMAND...`.

REQUIREMENTS is a JSON list for pip. The packages are installed into a virtual environment that is named by its
content, made once on a node for each user, and layered over raytide's own packages. This runs as the script does, with
its user's rights and its output: an install can do no more than the script, and a failed one ends it with pip's words.
Ray's own `pip` would copy the whole virtual environment of the node for each list.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import site
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from raytide.actors.gang.process_shim import NOT_STARTED
from raytide.core.errors import ConfigError, StorageError
from raytide.core.io.private_folder import private_folder

INSTALL_FAILED = 120
"""The exit code of a command whose packages could not be installed."""
_READY = "ready"
_IN_USE: dict[Path, int] = {}
"""The descriptors that keep environments from being removed while this process lives."""
_KEPT_S = 30 * 86_400.0
"""The time that an environment is kept after its last use."""


def with_packages(requirements: Sequence[str], command: Sequence[str]) -> tuple[str, ...]:
    """Returns the command that runs `command` with these packages."""
    here = ("python", "-P", "-m", "raytide.actors.gang.packages")
    return (*here, json.dumps(list(requirements)), *command) if requirements else tuple(command)


def interpreter_with(requirements: Sequence[str]) -> str:
    """Returns the Python that has these packages, made on this node if it is not there, and kept until this process
    ends. Raises ConfigError with pip's last lines if they cannot be installed."""
    if not requirements:
        return sys.executable
    named = ", ".join(requirements)
    try:
        path, handle = environment_of(requirements, private_folder("environments"), is_quiet=True)
    except subprocess.CalledProcessError as error:
        said = [line.strip() for line in (error.output or "").splitlines() if line.strip()]
        why = next((line for line in reversed(said) if line.startswith("ERROR")), "") or " ".join(said[-2:]) or error
        raise ConfigError(
            f"the packages {named} cannot be installed on {socket.gethostname()}: {why}",
            hint="Correct `pip` in the spec, or pip's configuration on the nodes.",
        ) from error
    except OSError as error:
        raise StorageError(
            f"the packages {named} cannot be installed: {error}.", hint="Free space in TMPDIR."
        ) from error
    _IN_USE[path] = handle
    return str(path / "bin" / "python")


def keep_own() -> None:
    """Keeps the environment that this process runs in, if it is one of these, until it ends."""
    lock = Path(sys.prefix).with_suffix(".lock")
    if (Path(sys.prefix) / _READY).exists() and lock.exists():
        _IN_USE[Path(sys.prefix)] = handle = os.open(lock, os.O_RDWR)
        fcntl.flock(handle, fcntl.LOCK_SH)


def content_key(requirements: Sequence[str]) -> str:
    """Returns the name of the environment: it changes with the requirements and with what lies below it."""
    below = {name: _version(name) for name in ("raytide", "ray", "torch")}
    content = [sorted(requirements), sys.version, sys.prefix, below]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def environment_of(requirements: Sequence[str], folder: Path, *, is_quiet: bool = False) -> tuple[Path, int]:
    """Returns the environment below `folder`, made if it is not there, and a descriptor that keeps it in use."""
    path = folder / content_key(requirements)
    handle = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        if not (path / _READY).exists():
            fcntl.flock(handle, fcntl.LOCK_EX)  # others on this node wait here
            if not (path / _READY).exists():
                _make(path, requirements, is_quiet=is_quiet)
            fcntl.flock(handle, fcntl.LOCK_SH)
        os.utime(path / _READY)
    except BaseException:
        os.close(handle)
        raise
    return path, handle


def remove_old(folder: Path, now_s: float) -> None:
    """Removes environments that nobody uses and that were last used long ago."""
    for ready in folder.glob(f"*/{_READY}"):
        path = ready.parent
        if now_s - ready.stat().st_mtime < _KEPT_S:
            continue
        handle = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass  # in use
        finally:
            os.close(handle)


def _make(path: Path, requirements: Sequence[str], *, is_quiet: bool) -> None:
    """Makes the environment in its place, since its scripts name it. Raises CalledProcessError with pip's exit code,
    and if it is quiet with pip's output."""
    shutil.rmtree(path, ignore_errors=True)  # of an installation that was cut
    if not is_quiet:
        sys.stdout.write(f"raytide: installing {', '.join(requirements)}\n")
        sys.stdout.flush()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    own = next(path.glob("lib/python*/site-packages"))
    below = "".join(f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages())
    (own / "_raytide.pth").write_text(below)
    pip = [sys.executable, "-m", "pip", "--python", str(path / "bin" / "python"), "install", "--no-input", "--quiet"]
    options = ["--disable-pip-version-check", "--progress-bar=off", "--no-warn-conflicts"]
    subprocess.run(
        [*pip, *options, "--", *requirements],
        check=True,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if is_quiet else None,
        stderr=subprocess.STDOUT if is_quiet else None,
    )
    (path / _READY).touch()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def main(requirements: str, command: Sequence[str]) -> int:
    """Replaces this process by the command; returns an exit code only if that fails."""
    folder = private_folder("environments")
    wanted: list[str] = json.loads(requirements)
    try:
        path, handle = environment_of(wanted, folder)
    except (subprocess.CalledProcessError, OSError) as error:
        sys.stdout.write(f"raytide: the packages {', '.join(wanted)} cannot be installed: {error}\n")
        return INSTALL_FAILED
    remove_old(folder, time.time())
    os.set_inheritable(handle, True)
    os.environ["VIRTUAL_ENV"] = str(path)
    os.environ["PATH"] = f"{path / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    program = "python" if command[0] in ("python", "python3", sys.executable) else command[0]
    sys.stdout.flush()
    try:
        os.execvp(program, [program, *command[1:]])  # the user's own command  # nosec B606
    except OSError as error:
        sys.stdout.write(f"raytide: {program} cannot be run: {error}\n")
    return NOT_STARTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
