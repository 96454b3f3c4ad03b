"""Records the kernel launches of a step once and repeats them in one call: CUDA graphs, and a fake for machines without
a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Tensor = torch.Tensor
Pool = tuple[int, int]
"""torch's handle of the memory that captured graphs share."""


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A recorded step. `replay` runs it again and overwrites `out` in place."""

    replay: Callable[[], None]
    out: Tensor


class GraphCapture(Protocol):
    """The interface for capturing graphs. Graphs of one pool share memory for intermediate results, so only one of
    these graphs may run at a time.
    """

    def new_pool(self) -> Pool: ...

    def capture(self, step: Callable[[], Tensor], pool: Pool) -> CapturedStep:
        """Records `step`. Before the recording, the call may run `step` once. Tensors that `step` reads and writes must
        live as long as the graph.
        """
        ...


class CudaGraphCapture:
    """Captures CUDA graphs (HIP graphs on ROCm). A step must neither wait for the device nor copy from the host."""

    def new_pool(self) -> Pool:
        return torch.cuda.graph_pool_handle()

    def capture(self, step: Callable[[], Tensor], pool: Pool) -> CapturedStep:
        # Kernels are compiled and libraries initialised outside of the capture, on a stream as the capture's.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):  # type: ignore[arg-type]  # a NewType of this pair
            out = step()
        return CapturedStep(graph.replay, out)


class FakeGraphCapture:
    """A fake that replays a step by calling it again. For tests, it records from which pools graphs were captured."""

    def __init__(self) -> None:
        self.pools = 0
        self.captured_from: list[Pool] = []

    def new_pool(self) -> Pool:
        self.pools += 1
        return (0, self.pools)

    def capture(self, step: Callable[[], Tensor], pool: Pool) -> CapturedStep:
        self.captured_from.append(pool)
        out = step()

        def replay() -> None:
            out.copy_(step())

        return CapturedStep(replay, out)
