"""torchvision, torchaudio and torchcodec beside torch: vLLM asks for them, and builds for CUDA beside a CPU torch break
whatever imports them, transformers and vLLM among it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def broken_torch_packages() -> list[str]:
    """Those that are installed and cannot be imported. Each is tried in a process of its own, which takes seconds."""
    return [name for name in COMPANIONS if installed_version(name) is not None and not imports(name)]


def imports(module: str) -> bool:
    """Whether a fresh interpreter can import it."""
    if find_spec(module.partition(".")[0]) is None:
        return False
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, timeout=120, check=False)
    return done.returncode == 0


def removal(names: Iterable[str]) -> str:
    """The command that mends it: nothing of raytide's needs them."""
    return f"{sys.executable} -m pip uninstall -y {' '.join(names)}"
