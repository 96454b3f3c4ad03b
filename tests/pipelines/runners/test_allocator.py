"""Memory that is freed is used again without the kernel."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import resource, sys
from raytide.pipelines.runners.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
for _ in range(20):
    buffers = [bytes([1]) * (20 << 20) for _ in range(3)]
    del buffers
print(faults() - before)
"""


def test_freed_memory_is_used_again() -> None:
    kept, returned = (
        int(subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, check=True, timeout=120).stdout)
        for how in ("kept", "returned")
    )
    assert kept < returned / 5
