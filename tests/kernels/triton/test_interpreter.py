"""The kernels in Triton's interpreter, which must be chosen before Triton is imported and so in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raytide.kernels.triton.support import is_installed

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(not is_installed(), reason="Triton is not installed; ./dev setup installs it")
def test_every_kernel_computes_what_the_reference_computes() -> None:
    script = ROOT / "tests" / "kernels" / "triton" / "interpreted.py"
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", str(script)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "platform")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
