"""Checks that users' specs do not name private paths. These paths hold the secrets of raytide, the system or the
operator.

Trainers, builds and endpoints read and write the paths of a spec as raytide's user. A dataset built from `client.json`,
for example, would reveal the operator's token. `metadata.raytide.data_roots` restricts specs further, to the paths
below these roots.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from raytide.core.config import environment, home
from raytide.core.errors import DeniedError

ROOTS = "RAYTIDE_DATA_ROOTS"
"""The environment variable that carries the data roots, as JSON, from the driver to its actors and tasks."""
MOST_ENTRIES = 10_000
"""The most entries of a folder tree that are checked for links."""
_LEVELS = 3

_DATA_IN_HOME = (".cache", ".local/share")
"""The hidden entries of a home that are not private; all others may hold settings and secrets."""
_SECRETS = (
    *(".ray", ".raytide", ".ssh", ".aws", ".azure", ".config", ".docker", ".git-credentials", ".gnupg", ".kube"),
    *(".netrc", ".npmrc", ".pypirc", ".boto", ".s3cfg", ".oci", ".pgpass", ".my.cnf"),
)
"""Names that are private in every folder, such as another user's home."""
_IN_CACHE = (".cache/huggingface/token", ".cache/huggingface/stored_tokens")
_OF_SYSTEM = ("/proc", "/sys", "/dev", "/etc", "/run", "/boot", "/var/log", "/var/run", "/var/spool")
_ALLOWED = ("/dev/shm", "/dev/null")  # nosec B108
"""The parts of `/dev` that specs may name."""
_NAMED = re.compile(r"session_\d{4}-\d\d-\d\d_.*|raytide-run-.*|rt-\d+-[0-9a-f]+")
"""Ray's sessions, which hold the logs of all jobs, and the folders of other scripts."""
_LOCAL = re.compile(r"^(file|local)://?", re.IGNORECASE)
_STORE = re.compile(r"^(s3|s3a|gs|gcs|abfs|abfss|az|hf)://", re.IGNORECASE)


def restrict_to(roots: Iterable[str]) -> None:
    """Restricts specs to the paths and URLs below these roots. This applies to this process and to processes that
    inherit its environment variable `ROOTS`. An empty list removes the restriction."""
    os.environ[ROOTS] = json.dumps([*roots])


def inherited_restriction() -> dict[str, dict[str, str]] | None:
    """Returns a `runtime_env` for `ray.init`, which passes this process's restriction on to all actors and tasks.
    Returns None if this process has no restriction.
    """
    return {"env_vars": {ROOTS: os.environ[ROOTS]}} if _roots() else None


def check_path(path: str, what: str = "") -> None:
    """Raises DeniedError if the path, after its links are resolved, is private or outside the data roots.

    `safe_opener` and `guarded_files` check the file once more when it is opened.
    """
    real = os.path.realpath(os.path.expanduser(path))
    if _is_in(real, _staged()):
        raise DeniedError(f"{what or path} is a local copy made by raytide.", hint="Name the original data.")
    _check_resolved(real, what or path)


def check_opened(path: str, what: str = "") -> None:
    """Raises DeniedError if an opened file is private or outside the data roots. raytide's own local copies are
    allowed."""
    real = os.path.realpath(path)
    if not _is_in(real, _staged()):
        _check_resolved(real, what or path)


def _check_resolved(real: str, what: str) -> None:
    if _is_private(real):
        raise DeniedError(
            f"{what} is in a folder of raytide or the system.",
            hint="Name another path, or leave the file out: a build has `exclude` for that.",
        )
    roots = _roots()
    if roots and not any(_is_in(real, root) for root in roots):
        raise _outside(what, roots)


def check_links(folder: str, what: str = "") -> None:
    """Raises DeniedError if a symbolic link in this folder leads to a private path. Searches three levels of folders,
    and at most MOST_ENTRIES entries. Links matter because the folder's files are opened by name."""
    left, level = MOST_ENTRIES, [folder]
    for _ in range(_LEVELS):
        below: list[str] = []
        for each in level:
            try:
                with os.scandir(each) as entries:
                    for entry in entries:
                        left -= 1
                        if left < 0:
                            return
                        if entry.is_symlink():
                            check_path(entry.path, f"{what or folder}: {entry.name}")
                        elif entry.is_dir(follow_symlinks=False):
                            below.append(entry.path)
            except OSError:
                continue  # not a folder, or not readable
        level = below


def check_named(config: object, where: str, *, links: bool = False) -> None:
    """Raises DeniedError if a spec contains a private path or URL at any depth. With `links`, also checks the symbolic
    links below these paths.

    `where` names the spec in the error.
    """
    if isinstance(config, Mapping):
        for key, value in config.items():
            check_named(value, f"{where}.{key}", links=links)
    elif isinstance(config, list | tuple):
        for value in config:
            check_named(value, where, links=links)
    elif isinstance(config, str) and "\0" not in config:
        for part in config.split("::"):
            _check_part(part, f"{where}: {config[:200]}", links=links)


def _check_part(part: str, what: str, *, links: bool) -> None:
    path = os.path.expanduser(_LOCAL.sub("/", part))
    is_path = path.startswith("/") or ".." in Path(path).parts
    if _STORE.match(path):
        _check_url(path, what)
    elif is_path or ("://" not in path and _exists(path) and not _is_private(os.path.realpath("."))):
        check_path(path, what)  # relative texts that name no file are not paths
        if links:
            check_links(path, what)


def safe_opener(path: str, flags: int) -> int:
    """Opens a file and returns the file's descriptor. The function is an `opener` for Python's `open`. Raises
    DeniedError if the opened file is private, even if links changed after an earlier check.

    The function does not write through a link at the end of the path, and opens only regular files.
    """
    is_written = flags & (os.O_WRONLY | os.O_RDWR)
    emptied = flags & os.O_TRUNC
    flags = flags & ~os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if is_written else 0)
    handle = os.open(path, flags, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        check_opened(os.readlink(f"/proc/self/fd/{handle}"), path)
        if emptied:
            os.ftruncate(handle, 0)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _is_private(real: str) -> bool:
    if any(part in _SECRETS or _NAMED.fullmatch(part) for part in real.split("/")):
        return True
    is_allowed = any(_is_in(real, allowed) for allowed in _ALLOWED)
    places = [place for place in _places() if not (is_allowed and place == "/dev")]
    if any(_is_in(real, place) for place in places):
        return True
    user = os.path.realpath(os.path.expanduser("~"))
    if user == "/" or not real.startswith(f"{user}/"):
        return False
    below = real[len(user) + 1 :]
    if not below.startswith("."):
        return False
    return not (any(_is_in(below, data) for data in _DATA_IN_HOME) or any(_is_in(real, place) for place in _python()))


@lru_cache
def _python() -> tuple[str, ...]:
    """Returns the folders of the installed Python, which pyenv, conda and virtual environments put into hidden
    folders."""
    places = (sys.prefix, sys.base_prefix, *sysconfig.get_paths().values())
    inside = (os.path.realpath(place) for place in places)
    return tuple(place for place in inside if not _is_in(os.path.realpath(Path.home()), place))


def _places() -> tuple[str, ...]:
    return _resolved(str(home()), os.path.expanduser("~"), os.environ.get("RAY_AUTH_TOKEN_PATH", ""))


def _staged() -> str:
    """Returns the folder in which `trainer.staging` keeps local copies."""
    return f"{os.path.realpath(tempfile.gettempdir())}/raytide-{os.getuid()}"


@lru_cache
def _resolved(raytide_home: str, home_dir: str, ray_token: str) -> tuple[str, ...]:
    own = [f"{raytide_home}/clusters", f"{raytide_home}/nodes", *([ray_token] if ray_token else [])]
    own += [f"{home_dir}/{name}" for name in _IN_CACHE]
    return (*map(os.path.realpath, own), *{*_OF_SYSTEM, *map(os.path.realpath, _OF_SYSTEM)})


def _roots() -> tuple[str, ...]:
    return _parsed(environment("DATA_ROOTS") or "")


@lru_cache
def _parsed(text: str) -> tuple[str, ...]:
    """Returns the data roots in a JSON text: URLs unchanged, paths with links resolved."""
    roots = json.loads(text) if text else []
    return tuple(root.rstrip("/") if "://" in root else os.path.realpath(os.path.expanduser(root)) for root in roots)


def _check_url(url: str, what: str) -> None:
    roots = _roots()
    parts = url.split("/")
    if roots and (".." in parts or not any("://" in root and _is_in(url, root) for root in roots)):
        raise _outside(what, roots)


def _outside(what: str, roots: Iterable[str]) -> DeniedError:
    return DeniedError(
        f"{what} is outside the data roots of this cluster.",
        hint=f"Use a path below {', '.join(roots)}, or ask the operator for another data root "
        "(metadata.raytide.data_roots).",
    )


def _exists(path: str) -> bool:
    try:
        return bool(path) and os.path.lexists(Path(path))  # Path drops `./`
    except (OSError, ValueError):
        return False


def _is_in(path: str, place: str) -> bool:
    return path == place or path.startswith(f"{place.rstrip('/')}/")
