"""Measures the node on which it runs, and prints one line: `python -m raytide.sdk.bench.node.measure SECONDS DISK_MIB`.

It runs as the script of a gang, with one process for each member. Two or more members also time an all-reduce. Each
figure is the best of the repetitions within SECONDS, because other work on the node can only slow a repetition down.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MARK = "raytide-node-figures "
_VECTOR = 2**25
"""Elements of the vectors that are added: 128 MiB of float32 each, more than caches hold."""
_MATRIX = {"cpu": 1536, "cuda": 8192}
_REDUCED = 2**24
"""Elements of the vector that is reduced: 64 MiB of float32."""
_MIB = 2**20
_ALL_REDUCE_TIMEOUT_S = 120.0


def main() -> None:
    seconds, disk_mib = float(sys.argv[1]), int(sys.argv[2])
    found = {**compute_figures(seconds), **network_figures(seconds), **disk_figures(disk_mib)}
    sys.stdout.write(f"{MARK}{json.dumps({'rank': int(os.environ.get('RANK', '0')), 'figures': found})}\n")
    sys.stdout.flush()


def compute_figures(seconds: float) -> dict[str, float]:
    """Returns the memory bandwidth in bytes per second, and the FLOP/s of matrix products for each dtype."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else _nothing
    moved_bytes = 3 * _VECTOR * torch.float32.itemsize  # two vectors are read, one is written
    found = {"memory_bytes_per_s": moved_bytes / best_of(_addition(device), wait, seconds)}
    size = _MATRIX[device]
    for dtype in (torch.float32, torch.bfloat16, *((torch.float16,) if device == "cuda" else ())):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        c = torch.empty(size, size, device=device, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        found[f"gemm_{name}_flops"] = 2 * size**3 / best_of(_product(a, b, c), wait, seconds)
    return found


def network_figures(seconds: float) -> dict[str, float]:
    """Returns the bytes per second that each member sends and receives in an all-reduce. The result is empty for a gang
    of one member.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return {}
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo", timeout=timedelta(seconds=_ALL_REDUCE_TIMEOUT_S))
    try:
        vector = torch.ones(_REDUCED, device="cuda" if has_gpu else "cpu")
        wait = torch.cuda.synchronize if has_gpu else _nothing
        # every member has to repeat it equally often
        times = [timed(lambda: dist.all_reduce(vector), wait) for _ in range(max(3, round(4 * seconds)))]
        members = dist.get_world_size()
    finally:
        dist.destroy_process_group()
    return {"all_reduce_bytes_per_s": 2 * (members - 1) / members * vector.nbytes / min(times[1:])}


def disk_figures(disk_mib: int) -> dict[str, float]:
    """Returns the bytes per second of writing a file with a final sync, and of reading it again without the page cache.

    The file is in the temporary folder. The result is empty for 0 MiB.
    """
    if not disk_mib:
        return {}
    block = os.urandom(_MIB)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "blocks"

        def write() -> None:
            with path.open("wb") as file:
                for _ in range(disk_mib):
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
                with suppress(OSError):  # a file system without it reads from its cache
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        def read() -> None:
            with path.open("rb", buffering=0) as file:
                while file.read(_MIB):
                    pass

        return {
            "disk_write_bytes_per_s": disk_mib * _MIB / timed(write, _nothing),
            "disk_read_bytes_per_s": disk_mib * _MIB / timed(read, _nothing),
        }


def best_of(work: Callable[[], object], wait: Callable[[], object], seconds: float) -> float:
    """Repeats `work` for `seconds`, at least three times, after one warm-up. Returns the shortest time of one
    repetition in seconds.

    `wait` blocks until the device has finished the work.
    """
    timed(work, wait)  # warms up
    until_s, times = time.perf_counter() + seconds, list[float]()
    while len(times) < 3 or time.perf_counter() < until_s:
        times.append(timed(work, wait))
    return min(times)


def timed(work: Callable[[], object], wait: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began_s


def _addition(device: str) -> Callable[[], object]:
    import torch

    first, second, out = (torch.ones(_VECTOR, device=device) for _ in range(3))
    return lambda: torch.add(first, second, out=out)


def _product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Callable[[], object]:
    import torch

    return lambda: torch.mm(a, b, out=c)


def _nothing() -> None:
    return None


if __name__ == "__main__":
    main()
