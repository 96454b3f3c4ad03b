"""Makes this process keep the memory that is freed after each chunk. The next chunk uses this memory again."""

from __future__ import annotations

import ctypes
from functools import cache

KEPT_BYTES = 256 << 20
BUFFER_BYTES = 32 << 20
"""The largest buffer that is kept; some versions of glibc accept no more."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)


@cache
def keep_freed_memory() -> None:
    """Lets this process keep up to KEPT_BYTES of freed memory, in buffers of up to BUFFER_BYTES, for later allocations.

    By default, glibc returns the buffers of each chunk to the kernel, which then clears the same pages for the next
    chunk. The function does nothing with other C libraries, which have no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, BUFFER_BYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
