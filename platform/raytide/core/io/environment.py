"""Which environment variables go from the operator's shell to the cluster's nodes, and from a node to users' commands.

An allowlist: what is not named stays behind, so that the operator's credentials reach the controller alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from raytide.core.config import environment

__all__ = ["MARKS", "NAME_PATTERN", "ON_NODES", "WITH_COMMANDS", "all_passed", "passed"]

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
"""By these the processes of a cluster and of a node are found, however far they are detached."""

WITH_COMMANDS = (*_SYSTEM, *_DEVICES, *_LIBRARIES, *MARKS)
"""What a user's command on a node gets. Nothing of Ray, whose token lets whoever has it do anything in it."""
ON_NODES = (*WITH_COMMANDS, "RAYTIDE_HOME", "RAYTIDE_CLUSTER_NAME", "RAYTIDE_PASS", "RAYTIDE_MLFLOW_*")
"""What a raylet gets, and with it the drivers, trainers and replicas below it, which are raytide's own programs."""

_SECRET = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|KEY|AUTH", re.IGNORECASE)
_NOT_SECRET = {"TOKENIZERS_PARALLELISM", "RAYTIDE_MLFLOW_TOKEN"}

NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*\*?$"
"""A variable's name, or how names begin: `OUR_*`."""


def passed(inherited: Mapping[str, str], allowed: Iterable[str], named: Iterable[str] = ()) -> dict[str, str]:
    """The variables that a pattern of `allowed` matches, and those that the operator `named`. A name that looks like a
    secret's must be `named` in full, since `HF_*` means the caches and not HF_TOKEN."""
    patterns, exact = tuple(allowed), set(named)
    more = tuple(name for name in exact if name.endswith("*"))

    def goes(name: str) -> bool:
        if name in exact or (name in _NOT_SECRET and _matches(name, patterns)):
            return True
        return not _SECRET.search(name) and _matches(name, (*patterns, *more))

    return {name: value for name, value in inherited.items() if goes(name)}


def all_passed(configured: Iterable[str]) -> tuple[str, ...]:
    """`pass_environment` of cluster.yaml, and the names (with commas between) in RAYTIDE_PASS, for one start."""
    extra = (environment("PASS") or "").split(",")
    return tuple(dict.fromkeys((*configured, *(name.strip() for name in extra if name.strip()))))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
