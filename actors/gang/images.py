"""Prepares a job's container image on a node with podman, before Ray starts a worker in it (`runtime_env`'s
`image_uri`).

Ray's agent could pull the image itself, but silently, and its error does not say whether another try can succeed. If
the image had another Ray version, the agent would start workers that cannot register, again and again. Therefore a task
on the node first pulls the image and finds its digest. The task then compares the Python, Ray, raytide and user of the
image with those of the node. Podman's own store keeps the images by content.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from raytide.core.config import installed_version
from raytide.core.errors import ClusterError, ConfigError, RaytideError
from raytide.core.io.environment import MARKS, passed
from raytide.core.io.private_folder import lock, private_folder

VARIABLE = "RAYTIDE_IMAGE"
"""The environment variable with the image of a process, by its digest."""
PREPARE_TIMEOUT_S = 1800.0
"""The additional time of workers that start in an image."""
_PULL_TIMEOUT_S, _RUN_TIMEOUT_S = 1500.0, 240.0
_AS_RAY = (
    *("--rm", "--cgroup-manager=cgroupfs", "--network=host", "--pid=host", "--ipc=host", "--userns=keep-id"),
    *("--entrypoint", "python"),
)
"""The options with which Ray starts a worker: a node that refuses them cannot run it."""
_PROBE = """
import json, os, sys
from importlib.metadata import PackageNotFoundError, version
found = {"Python": "%d.%d" % sys.version_info[:2], "Ray": "", "raytide": "", "user": str(os.getuid())}
for name in ("Ray", "raytide"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""
_MAY_PASS = re.compile(
    r"connection (refused|reset|timed out)|i/o timeout|deadline exceeded|handshake timeout|no such host|broken pipe"
    r"|server misbehaving|temporary failure|network is unreachable|no route to host|unexpected EOF|toomanyrequests"
    r"|\b(429|5\d\d) [A-Z(]|status:? (429|5\d\d)|no space left on device|resource temporarily unavailable"
    r"|cannot allocate memory|within the timeout of",
    re.IGNORECASE,
)
"""In podman's and Ray's errors: a failure of the network or the registry, or of a full node."""
_HINTS = (
    (
        re.compile("only supported in rootless mode"),
        "Ray starts containers only where its own processes do not run as root: start the nodes as another user.",
    ),
    (
        re.compile(r"python\W* not found|\"python\": executable file|no such file or directory: 'python'"),
        "The image needs `python` on its PATH, with the node's Ray and raytide: build it from raytide's own image.",
    ),
    (
        re.compile("unauthorized|denied|authentication required"),
        "See that it exists, and log the nodes' user in: `podman login REGISTRY` there.",
    ),
)
_INSTALL = "Install podman on the nodes (docs/images.md), or leave `image` out."
_OVERLAY = (
    'Set `driver = "overlay"` in the storage.conf of the nodes\' user, and run `podman system reset` (docs/images.md).'
)
_WHY_CHARS = 500


class ImagePullError(ClusterError):
    """Raised if an image could not be pulled for a reason that may be temporary."""


def prepare(image: str) -> dict[str, Any]:
    """Makes the image usable on this node. Returns the `runtime_env` for a worker in the image, with the image's digest
    in `image_uri`.

    Raises ConfigError if another try cannot succeed: the image does not exist, the node has no podman, or the image
    differs from the node in its Python, Ray, raytide or user. Raises ImagePullError for a failure that may pass,
    such as a failure of the registry.
    """
    if shutil.which("podman") is None:
        raise _error(image, "there is no podman", _INSTALL)
    folder = private_folder("images")
    with lock(folder / f"{_hash(image)}.lock", PREPARE_TIMEOUT_S):
        _check_driver(image)
        if _podman(image, "image", "exists", image).returncode:
            if image.startswith("localhost/"):
                why = "it is not in podman's store there, and localhost/ is no registry"
                raise _error(image, why, "Push it to a registry that the nodes reach, or load it on each node.")
            _checked(image, _podman(image, "pull", "--quiet", image, timeout_s=_PULL_TIMEOUT_S))
        (info,) = json.loads(_checked(image, _podman(image, "image", "inspect", image)))
        pinned = image if "@" in image else f"{name_of(image)}@{info['Digest']}"
        here = _versions()
        is_fit = folder / _hash(str(info["Id"]), json.dumps(here))
        if not is_fit.exists():
            output = _checked(image, _podman(image, "run", *_AS_RAY, pinned, "-c", _PROBE, timeout_s=_RUN_TIMEOUT_S))
            _check_versions(image, json.loads(output.strip().splitlines()[-1]), here)
            is_fit.touch()
    marks = {name: value for name, value in passed(os.environ, MARKS).items() if "'" not in value}  # Ray quotes with it
    return {"image_uri": pinned, "env_vars": {VARIABLE: pinned, "PYTHONUNBUFFERED": "1", **marks}}


def name_of(image: str) -> str:
    """Returns an image reference without its digest and tag."""
    name = image.partition("@")[0]
    registry, slash, path = name.rpartition("/")
    return f"{registry}{slash}{path.partition(':')[0]}"


def failure_of(image: str, output: str, code: int = 0) -> RaytideError:
    """Returns the error for a failure of podman. It is an ImagePullError if another try may succeed, else a
    ConfigError. `output` is podman's own output, or an error message of Ray's agent that quotes podman's output.
    """
    if "No such file or directory: 'podman'" in output:
        return _error(image, "there is no podman", _INSTALL)
    late = re.search(r"Failed to install runtime_env within the timeout of \d+ seconds", output)
    printed = output.rpartition("stderr=")[2]  # before it, Ray quotes the command
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if line.startswith("Error")), lines[-1] if lines else "")
    why = late[0] if late else last.removeprefix("Error: ") or f"podman ended with exit code {code}"
    if _MAY_PASS.search(why):
        hint = "It may pass: see that the nodes reach the registry and have free space."
        return ImagePullError(_text(image, why), hint=hint)
    return _error(image, why, next((hint for found, hint in _HINTS if found.search(why)), ""))


def _podman(image: str, *command: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(  # nosec B607
            ["podman", *command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise ImagePullError(
            _text(image, f"`podman {command[0]}` did not end within {timeout_s:g} s"),
            hint="It may pass: see that the nodes reach the registry, and their load.",
        ) from None


def _checked(image: str, done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode:
        raise failure_of(image, done.stderr, done.returncode)
    return done.stdout


def _check_driver(image: str) -> None:
    """Raises ConfigError for the storage driver that copies the whole image for each worker: Ray gives a worker up that
    takes a minute to start, and starts the next one, without end."""
    driver = _checked(image, _podman(image, "info", "--format", "{{.Store.GraphDriverName}}")).strip()
    if driver == "vfs":
        why = "podman's storage driver there is vfs, which copies the whole image for each worker"
        raise _error(image, why, _OVERLAY)


def _check_versions(image: str, inside: Mapping[str, str], here: Mapping[str, str]) -> None:
    if inside["raytide"] and inside == {**here, "raytide": here["raytide"] or inside["raytide"]}:
        return  # a checkout that is not installed has no version
    have, want = (
        ", ".join(f"{name} {each[name]}" if each[name] else f"no {name}" for name in here) for each in (inside, here)
    )
    hint = "Build it from raytide's own image, with the number of the nodes' user as its USER (docs/images.md)."
    raise _error(image, f"it has {have}, and the node {want}", hint)


def _versions() -> dict[str, str]:
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    ray, raytide = installed_version("ray") or "", installed_version("raytide") or ""
    return {"Python": python, "Ray": ray, "raytide": raytide, "user": str(os.getuid())}


def _error(image: str, why: str, hint: str) -> ConfigError:
    return ConfigError(_text(image, why), hint=hint or "Correct `image` in the spec, or podman's setup on the nodes.")


def _text(image: str, why: str) -> str:
    return f"the image {image} cannot be used on {socket.gethostname()}: {why[:_WHY_CHARS].rstrip('.')}."


def _hash(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
