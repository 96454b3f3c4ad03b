"""Makes the stand-in for NVIDIA's library, and the GPUs that it shows."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

_COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
HEALTHY = {
    "use": 40, "sm_clock": 1980, "temperature": 61, "milliwatts": 350_500, "millijoules": 9_000_000,
    "memory_used": 3 << 30, "ecc": 0, "remapped": 0, "xid": 0,
}  # fmt: skip


def make_library(folder: Path) -> Path:
    """Compiles `libnvidia-ml.so.1` into the folder, for LD_LIBRARY_PATH."""
    if _COMPILER is None:
        pytest.skip("no C compiler makes the stand-in for NVIDIA's library")
    source = Path(__file__).with_name("fake_nvml.c")
    output = folder / "libnvidia-ml.so.1"
    subprocess.run(
        [_COMPILER, "-shared", "-fPIC", "-O1", "-Wall", "-o", str(output), str(source)], check=True, timeout=60
    )
    return folder


def write_gpu(folder: Path, index: int, values: Mapping[str, float]) -> None:
    part = folder / f"gpu{index}.part"
    part.write_text("".join(f"{key} {value}\n" for key, value in values.items()))
    part.replace(folder / f"gpu{index}")
