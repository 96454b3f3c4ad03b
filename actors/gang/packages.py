"""Installs the packages that a job or an endpoint lists in `pip`, and runs a command with them: `python -m
raytide.actors.gang.packages REQUIREMENTS COMMAND...`.

REQUIREMENTS is a JSON list for pip. The packages are installed into a virtual environment on top of raytide's own
packages. The environment is named by a hash of its content, and is made once per node and user. Ray's own `pip` option
would copy the node's whole virtual environment for each list.

The installation runs with the rights of the script's user, so it can do no more than the script. It prints to the
script's output. If it fails, the script ends with pip's error.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import site
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from raytide.actors.gang.process_shim import NOT_STARTED
from raytide.core.config import installed_version
from raytide.core.errors import ClusterError, ConfigError, RaytideError, StorageError
from raytide.core.io.private_folder import private_folder

INSTALL_FAILED = 120
"""The exit code of a command whose packages can never be installed: another attempt would fail in the same way."""
INSTALL_INTERRUPTED = 121
"""The exit code of a command whose packages could not be installed for a reason that may pass."""
_CANNOT = "cannot be installed"
_MAY_PASS = re.compile(
    r"connection error|connection broken by|timed? ?out|max retries exceeded|\b(429|5\d\d) (Server|Client) Error"
    r"|HTTP error (429|5\d\d)|No space left on device",
    re.IGNORECASE,
)
"""Matches the failures in pip's log that may pass: those of the network, of the index or of a full disk. pip itself
reports them as a package that does not exist.
"""
_READY = "ready"
_LOG = "pip.log"
_BY_PYTHON = re.compile(rb"#!%b/python[0-9.]*\n" % re.escape(os.fsencode(Path(sys.executable).parent)))
"""The first line of a program that raytide's interpreter runs."""
_LINE_BYTES = 4096
_FORMAT = 2
"""The version of the environments' format: others are not used."""
_IN_USE: dict[Path, int] = {}
"""The descriptors that keep environments from being removed while this process lives."""
_KEPT_S = 30 * 86_400.0
"""The time that an environment is kept after its last use."""
_WHY_CHARS = 500


def with_packages(requirements: Sequence[str], command: Sequence[str]) -> tuple[str, ...]:
    """Returns a command that installs these packages and then runs `command` with them."""
    here = ("python", "-P", "-m", "raytide.actors.gang.packages")
    return (*here, json.dumps(list(requirements)), *command) if requirements else tuple(command)


def interpreter_with(requirements: Sequence[str]) -> str:
    """Returns the path of a Python interpreter that has these packages. Makes the environment if this node lacks it,
    and protects it from removal until this process ends. Raises the same errors as `environment_of`.
    """
    if not requirements:
        return sys.executable
    path, handle = environment_of(requirements, private_folder("environments"), is_quiet=True)
    _IN_USE[path] = handle
    return str(path / "bin" / "python")


def is_final(requirements: Sequence[str], code: int, tail: str) -> bool:
    """Returns whether a command ended because its packages can never be installed. `code` is the command's exit code,
    and `tail` is its last output.
    """
    return bool(requirements) and code == INSTALL_FAILED and _CANNOT in tail


def keep_own() -> None:
    """Makes sure that this process's own environment is not removed while the process runs. Does nothing if this module
    did not make that environment.
    """
    lock = Path(sys.prefix).with_suffix(".lock")
    if (Path(sys.prefix) / _READY).exists() and lock.exists():
        _IN_USE[Path(sys.prefix)] = handle = os.open(lock, os.O_RDWR)
        fcntl.flock(handle, fcntl.LOCK_SH)


def content_key(requirements: Sequence[str]) -> str:
    """Returns the name of an environment. The name is a hash of the requirements, the Python version and prefix, and
    the versions of raytide, Ray and torch.
    """
    below = {name: installed_version(name) or "" for name in ("raytide", "ray", "torch")}
    content = [_FORMAT, sorted(requirements), sys.version, sys.prefix, below]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def environment_of(requirements: Sequence[str], folder: Path, *, is_quiet: bool = False) -> tuple[Path, int]:
    """Returns the path of the environment in `folder`, and a file descriptor. While the descriptor is open, the
    environment is protected from removal. Makes the environment if it does not exist.

    Raises ConfigError with pip's reason if the packages cannot be installed, ClusterError if pip failed for a reason
    that may pass (the network, the package index, a full disk), and StorageError if the environment cannot be made.
    """
    path = folder / content_key(requirements)
    handle = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        if not (path / _READY).exists():
            fcntl.flock(handle, fcntl.LOCK_EX)  # others on this node wait here
            if not (path / _READY).exists():
                try:
                    _make(path, requirements, is_quiet=is_quiet)
                except (subprocess.CalledProcessError, OSError) as error:  # of `venv`
                    raise StorageError(
                        f"the packages {', '.join(requirements)} {_CANNOT}: {error}.", hint="Free space in TMPDIR."
                    ) from error
            fcntl.flock(handle, fcntl.LOCK_SH)
        os.utime(path / _READY)
    except BaseException:
        os.close(handle)
        raise
    return path, handle


def remove_old(folder: Path, now_s: float) -> None:
    """Removes environments that no process uses and that were last used more than 30 days ago."""
    for ready in folder.glob(f"*/{_READY}"):
        path = ready.parent
        try:
            used_s = ready.stat().st_mtime
        except FileNotFoundError:  # another process has just removed it
            continue
        if now_s - used_s < _KEPT_S:
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
    """Makes the environment at its final path, because its scripts contain that path."""
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
    log = path / _LOG  # has what pip does not print: why it could not fetch a page of the index
    done = subprocess.run(
        [*pip, *options, "--log", str(log), "--", *requirements],
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if is_quiet else None,
        stderr=subprocess.STDOUT if is_quiet else None,
    )
    logged = log.read_text(errors="replace") if log.exists() and done.returncode else ""
    log.unlink(missing_ok=True)
    if done.returncode:
        raise _install_error(requirements, f"{done.stdout or ''}\n{logged}", done.returncode)
    _copy_programs(path / "bin")
    (path / _READY).touch()


def _copy_programs(into: Path) -> None:
    """Copies the Python programs of raytide's own environment, such as `torchrun`, unless the packages have their own.
    The first line of a program names its interpreter, and raytide's interpreter does not have the packages.
    """
    for program in Path(sys.executable).parent.iterdir():
        if (into / program.name).exists() or not program.is_file():
            continue
        with suppress(PermissionError), program.open("rb") as file:
            if _BY_PYTHON.fullmatch(file.readline(_LINE_BYTES)):
                (into / program.name).write_bytes(b"#!%b\n%b" % (os.fsencode(into / "python"), file.read()))
                (into / program.name).chmod(0o755)


def _install_error(requirements: Sequence[str], output: str, code: int) -> RaytideError:
    """Returns the error of a failed installation: ClusterError if pip's output shows a cause that may pass, so that it
    is worth another try, else ConfigError.
    """
    lines = [re.sub(r"^\S+T\S+,\d+ ", "", line).strip() for line in output.splitlines()]
    failed = next((line for line in reversed(lines) if _MAY_PASS.search(line)), "")
    last = next((line for line in reversed(lines) if line.startswith("ERROR")), "")
    why = failed or last or " ".join([line for line in lines if line][-2:]) or f"pip ended with exit code {code}"
    text = f"the packages {', '.join(requirements)} {_CANNOT} on {socket.gethostname()}: {why[:_WHY_CHARS]}"
    if failed:
        return ClusterError(text, hint="It may pass: see that the nodes reach the package index and have free space.")
    return ConfigError(text, hint="Correct `pip` in the spec, or pip's configuration on the nodes.")


def main(requirements: str, command: Sequence[str]) -> int:
    """Installs the packages and replaces this process by the command. Returns an exit code only if the installation
    fails or the command cannot be started.
    """
    folder = private_folder("environments")
    wanted: list[str] = json.loads(requirements)
    try:
        path, handle = environment_of(wanted, folder)
    except RaytideError as error:
        sys.stdout.write(f"raytide: {error}\n")
        return INSTALL_FAILED if isinstance(error, ConfigError) else INSTALL_INTERRUPTED
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
