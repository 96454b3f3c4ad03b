"""Checks torchvision, torchaudio and torchcodec, which vLLM requires. If torch is a CPU build, CUDA builds of these
packages break vLLM and transformers.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec

from raytide.core.config import installed_version

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def broken_torch_packages() -> list[str]:
    """Returns the packages that are installed but cannot be imported. Each is tested in a new process, which takes
    seconds.
    """
    return [name for name in COMPANIONS if installed_version(name) is not None and not imports(name)]


IMPORT_S = 600.0
"""The most seconds that an import may take: much for a busy machine that reads the package from a slow disk."""


def imports(module: str) -> bool:
    """Returns whether a new interpreter can import the module within IMPORT_S seconds."""
    if find_spec(module.partition(".")[0]) is None:
        return False
    command = [sys.executable, "-c", f"import {module}"]
    try:
        return subprocess.run(command, capture_output=True, timeout=IMPORT_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def removal(names: Iterable[str]) -> str:
    """Returns the shell command that removes these packages. raytide itself does not need the packages."""
    return f"{sys.executable} -m pip uninstall -y {' '.join(names)}"
