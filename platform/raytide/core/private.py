"""Places on a machine that users' specs must not name: raytide's own secrets and those of whoever started it.

Trainers, builds and endpoints read and write what a spec names as raytide's user. A dataset built from `client.json`
would show its builder the operator's token.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from raytide.core.config import home
from raytide.core.errors import DeniedError

__all__ = ["check_named", "check_path"]

_OF_HOME = (".ray", ".ssh", ".aws", ".azure", ".config", ".docker", ".git-credentials", ".gnupg", ".kube", ".netrc")
_OF_SYSTEM = ("/proc", "/sys", "/dev", "/etc", "/run", "/boot", "/var/log", "/var/run")
_ALLOWED = ("/dev/shm", "/dev/null")  # what users may name; nothing is written there  # nosec B108
_NAMED = re.compile(r"session_\d{4}-\d\d-\d\d_.*|raytide-run-.*|rt-\d+-[0-9a-f]+")
"""Ray's sessions, with every job's logs, and the folders of other scripts."""
_LOCAL = re.compile(r"^(file|local)://?", re.IGNORECASE)


def check_path(path: str, what: str = "") -> None:
    """DeniedError when the path, once its links are followed, lies in a private place. `guarded_files` looks at
    what is then opened."""
    real = os.path.realpath(os.path.expanduser(path))
    if any(_is_in(real, allowed) for allowed in _ALLOWED):
        return
    if any(_is_in(real, place) for place in _places()) or any(_NAMED.fullmatch(part) for part in Path(real).parts):
        raise DeniedError(
            f"{what or path} is in a place that is raytide's own, or of the system.", hint="Name another path."
        )


def check_named(config: object, where: str) -> None:
    """The same for every text of a spec, however deep, that is an absolute path or climbs out of its folder."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            check_named(value, f"{where}.{key}")
    elif isinstance(config, list | tuple):
        for value in config:
            check_named(value, where)
    elif isinstance(config, str) and len(config) < 4096 and "\0" not in config:
        for part in config.split("::"):
            path = _LOCAL.sub("/", part)
            if path.startswith(("/", "~")) or ".." in Path(path).parts:
                check_path(path, f"{where}: {config}")


def _places() -> tuple[str, ...]:
    return _resolved(str(home() / "clusters"), str(Path.home()), os.environ.get("RAY_AUTH_TOKEN_PATH", ""))


@lru_cache
def _resolved(clusters: str, home_dir: str, ray_token: str) -> tuple[str, ...]:
    own = (clusters, *(f"{home_dir}/{name}" for name in _OF_HOME), *([ray_token] if ray_token else []))
    return tuple(os.path.realpath(place) for place in (*own, *_OF_SYSTEM))


def _is_in(path: str, place: str) -> bool:
    return path == place or path.startswith(f"{place}/")
