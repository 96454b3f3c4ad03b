"""Checks torchvision, torchaudio and torchcodec, which vLLM requires: CUDA builds of these packages beside a CPU build
of torch break vLLM and transformers.
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


def imports(module: str) -> bool:
    """Tests whether a fresh interpreter can import the module."""
    if find_spec(module.partition(".")[0]) is None:
        return False
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, timeout=120, check=False)
    return done.returncode == 0


def removal(names: Iterable[str]) -> str:
    """Returns the shell command that removes these packages, which raytide itself does not need."""
    return f"{sys.executable} -m pip uninstall -y {' '.join(names)}"
