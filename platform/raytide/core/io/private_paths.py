"""Places on a machine that users' specs must not name: raytide's own secrets and those of whoever started it.

Trainers, builds and endpoints read and write what a spec names as raytide's user. A dataset built from `client.json`
would show its builder the operator's token. With `metadata.raytide.data_roots` they may name what lies below these
alone.
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

__all__ = ["ROOTS", "check_links", "check_named", "check_opened", "check_path", "restrict_to", "safe_opener"]

ROOTS = "RAYTIDE_DATA_ROOTS"
"""The environment variable in which the data roots travel, as JSON, from the driver to its actors and tasks."""
MOST_ENTRIES = 10_000
"""Entries of one folder, and of those in it, that are looked at for links."""
_LEVELS = 3

_DATA_IN_HOME = (".cache", ".local/share")
"""Entries of a home that begin with a dot are its owner's settings and secrets, except these."""
_SECRETS = (
    *(".ray", ".raytide", ".ssh", ".aws", ".azure", ".config", ".docker", ".git-credentials", ".gnupg", ".kube"),
    *(".netrc", ".npmrc", ".pypirc", ".boto", ".s3cfg", ".oci", ".pgpass", ".my.cnf"),
)
"""Names that are private in whatever folder they lie, as in another user's home."""
_IN_CACHE = (".cache/huggingface/token", ".cache/huggingface/stored_tokens")
_OF_SYSTEM = ("/proc", "/sys", "/dev", "/etc", "/run", "/boot", "/var/log", "/var/run", "/var/spool")
_ALLOWED = ("/dev/shm", "/dev/null")  # nosec B108
"""The parts of `/dev` that specs may name."""
_NAMED = re.compile(r"session_\d{4}-\d\d-\d\d_.*|raytide-run-.*|rt-\d+-[0-9a-f]+")
"""Ray's sessions, with every job's logs, and the folders of other scripts."""
_LOCAL = re.compile(r"^(file|local)://?", re.IGNORECASE)
_STORE = re.compile(r"^(s3|s3a|gs|gcs|abfs|abfss|az|hf)://", re.IGNORECASE)


def restrict_to(roots: Iterable[str]) -> None:
    """Keep what specs name below these paths and URLs, in this process and those that get its `ROOTS`; no roots lift
    that."""
    os.environ[ROOTS] = json.dumps([*roots])


def check_path(path: str, what: str = "") -> None:
    """DeniedError when the path, once its links are followed, lies in a private place or outside the data roots.
    `safe_opener` and `guarded_files` look at what is then opened."""
    real = os.path.realpath(os.path.expanduser(path))
    if _is_in(real, _staged()):
        raise DeniedError(f"{what or path} is raytide's own copy of data.", hint="Name the data itself.")
    check_opened(real, what or path)


def check_opened(path: str, what: str = "") -> None:
    """The same for what is opened in the end, which may be raytide's own local copy of a URL's data."""
    real = os.path.realpath(path)
    if _is_in(real, _staged()):
        return
    if _is_private(real):
        raise DeniedError(
            f"{what or path} is in a place that is raytide's own, or of the system.", hint="Name another path."
        )
    roots = _roots()
    if roots and not any(_is_in(real, root) for root in roots):
        raise _outside(what or path, roots)


def check_links(folder: str, what: str = "") -> None:
    """The same for the links in a folder and in those below it, as far as it exists: its files are opened by name."""
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
                continue  # it is no folder, or nobody's to read
        level = below


def check_named(config: object, where: str, *, links: bool = False) -> None:
    """The same for every text of a spec, however deep, that names a place; with `links`, for those in it too, which
    matters where its files are opened by name."""
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
        check_path(path, what)  # a text that names nothing is taken for no path
        if links:
            check_links(path, what)


def safe_opener(path: str, flags: int) -> int:
    """For `open(..., opener=safe_opener)`: DeniedError when what was opened is private, whatever links were exchanged
    since the path was checked. A link at the end of a path is not written through; a pipe is no file."""
    is_written = flags & (os.O_WRONLY | os.O_RDWR)
    emptied = flags & os.O_TRUNC
    flags = flags & ~os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if is_written else 0)
    handle = os.open(path, flags, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", path)
        check_opened(os.readlink(f"/proc/self/fd/{handle}"), path)
        if emptied:
            os.ftruncate(handle, 0)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _is_private(real: str) -> bool:
    if any(part in _SECRETS or _NAMED.fullmatch(part) for part in Path(real).parts):
        return True
    is_allowed = any(_is_in(real, allowed) for allowed in _ALLOWED)
    places = [place for place in _places() if not (is_allowed and place == "/dev")]
    if any(_is_in(real, place) for place in places):
        return True
    user = os.path.realpath(Path.home())
    if user == "/" or not real.startswith(f"{user}/"):
        return False
    below = real[len(user) + 1 :]
    if not below.startswith("."):
        return False
    return not (any(_is_in(below, data) for data in _DATA_IN_HOME) or any(_is_in(real, place) for place in _python()))


@lru_cache
def _python() -> tuple[str, ...]:
    """The installed Python and its packages, which pyenv, conda and virtual environments keep in hidden folders."""
    places = (sys.prefix, sys.base_prefix, *sysconfig.get_paths().values())
    inside = (os.path.realpath(place) for place in places)
    return tuple(place for place in inside if not _is_in(os.path.realpath(Path.home()), place))


def _places() -> tuple[str, ...]:
    return _resolved(str(home()), str(Path.home()), os.environ.get("RAY_AUTH_TOKEN_PATH", ""))


def _staged() -> str:
    """Where `trainer.staging` keeps local copies."""
    return f"{os.path.realpath(tempfile.gettempdir())}/raytide-{os.getuid()}"


@lru_cache
def _resolved(raytide_home: str, home_dir: str, ray_token: str) -> tuple[str, ...]:
    own = [f"{raytide_home}/clusters", f"{raytide_home}/nodes", *([ray_token] if ray_token else [])]
    own += [f"{home_dir}/{name}" for name in _IN_CACHE]
    return tuple(os.path.realpath(place) for place in own) + tuple(_both(_OF_SYSTEM))


def _both(places: Iterable[str]) -> Iterable[str]:
    return {*places, *map(os.path.realpath, places)}


def _roots() -> tuple[str, ...]:
    return _parsed(environment("DATA_ROOTS") or "")


@lru_cache
def _parsed(text: str) -> tuple[str, ...]:
    """URLs as they are, paths with their links followed."""
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
        hint=f"Name something below {', '.join(roots)}, or ask the operator for another one "
        "(metadata.raytide.data_roots).",
    )


def _exists(path: str) -> bool:
    try:
        return bool(path) and os.path.lexists(Path(path))  # which leaves out `./`
    except (OSError, ValueError):
        return False


def _is_in(path: str, place: str) -> bool:
    return path == place or path.startswith(f"{place.rstrip('/')}/")
