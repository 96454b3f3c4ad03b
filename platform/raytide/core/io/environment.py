"""Selects the environment variables that pass from the operator's shell to nodes, and from a node to users' commands.
Also ensures that requests to this machine bypass the proxies that these variables name.

The variables that may pass are in an allowlist, so that the operator's credentials reach only the controller.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

from raytide.core.config import environment

_SYSTEM = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "XDG_CACHE_HOME"),
    *("LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "CC", "CXX", "PYTHON*", "VIRTUAL_ENV", "SPT_NOENV"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
_DEVICES = (
    *("CUDA*", "CUBLAS*", "CUDNN*", "NVIDIA*", "HIP*", "ROCR*", "ROCM*", "HSA_*", "GPU_*"),
    *("NCCL*", "RCCL*", "UCX_*", "FI_*", "GLOO_*"),
)
_LIBRARIES = (
    *("OMP_*", "MKL_*", "OPENBLAS_*", "KMP_*", "GOMP_*", "RAYON_*", "MALLOC_*", "TOKENIZERS_PARALLELISM"),
    *("TORCH*", "PYTORCH*", "TRITON*", "VLLM_*", "HF_*", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_*", "JAX_*", "XLA_*"),
)
MARKS = ("RAYTIDE_CLUSTER", "RAYTIDE_NODE")
"""Variables by which all processes of a cluster or node are found, even detached ones."""

WITH_COMMANDS = (*_SYSTEM, *_DEVICES, *_LIBRARIES, *MARKS)
"""The environment of users' commands. It excludes Ray's variables, because Ray's token allows everything in Ray."""
ON_NODES = (
    *WITH_COMMANDS,
    "RAYTIDE_HOME",
    "RAYTIDE_CLUSTER_NAME",
    "RAYTIDE_PASS",
    "RAYTIDE_MLFLOW_*",
    "RAYTIDE_MODEL_*",
)
"""The environment of raylets, which the drivers, trainers and replicas that they start inherit: all are raytide's
programs.
"""

_SECRET = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|KEY|AUTH", re.IGNORECASE)
_NOT_SECRET = {"TOKENIZERS_PARALLELISM", "RAYTIDE_MLFLOW_TOKEN"}

NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*\*?$"
"""The pattern of a variable's name or prefix (`OUR_*`)."""


def passed(inherited: Mapping[str, str], allowed: Iterable[str], named: Iterable[str] = ()) -> dict[str, str]:
    """Returns the environment variables whose names match a pattern. The patterns are those in `allowed` and those in
    `named`, which is the operator's own list.

    A variable whose name looks like a secret passes only if `named` contains its full name. A pattern such as `HF_*`
    is meant for caches, and not for HF_TOKEN.
    """
    patterns, exact = tuple(allowed), set(named)
    more = tuple(name for name in exact if name.endswith("*"))

    def is_passed(name: str) -> bool:
        if name in exact or (name in _NOT_SECRET and _matches(name, patterns)):
            return True
        return not _SECRET.search(name) and _matches(name, (*patterns, *more))

    return {name: value for name, value in inherited.items() if is_passed(name)}


def all_passed(configured: Iterable[str]) -> tuple[str, ...]:
    """Returns the names in `pass_environment` of cluster.yaml and the comma-separated names in RAYTIDE_PASS."""
    extra = (environment("PASS") or "").split(",")
    return tuple(dict.fromkeys((*configured, *(name.strip() for name in extra if name.strip()))))


def is_loopback(host: str) -> bool:
    """Returns whether the host is a loopback address or the name `localhost`. Returns False for any other name."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def without_proxy(url: str) -> dict[str, None]:
    """Returns the `mounts` for an httpx client that calls `url`. For a loopback address, these mounts make the client
    connect directly, because no proxy can reach that address. NO_PROXY seldom lists the addresses 127.0.K.* of local
    clusters. For any other host, there are no mounts.
    """
    host = urlsplit(url).hostname or ""
    shown = f"[{host}]" if ":" in host else host
    return {f"all://{shown}": None} if is_loopback(host) else {}


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
