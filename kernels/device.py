"""The device on which a model runs: its key in the operator registry, its torch device, dtypes, default sizes and
memory.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass

import torch

from raytide.core.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone has it
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class Device:
    """The device on which a model runs, with the dtypes it supports and its default sizes.

    `kind` is the key in the operator registry. `block_size` is the size of KV blocks, in tokens, that suits the
    device's attention. `batch_tokens` is the smallest number of tokens in a step that uses the device fully.
    """

    kind: str
    torch_device: torch.device
    dtypes: frozenset[str]
    block_size: int
    batch_tokens: int

    def dtype(self, name: str) -> torch.dtype:
        if name not in self.dtypes:
            raise ConfigError(
                f"{self.kind} cannot compute in {name}.", hint=f"It takes {', '.join(sorted(self.dtypes))}."
            )
        return DTYPES[name]


def resolve_device(name: str = "auto") -> Device:
    """Returns the device with this name. The name `auto` selects the GPU if torch finds one, else the CPU.

    A ROCm device is named cuda, as in torch.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return Device("cpu", torch.device("cpu"), frozenset({"float32", "bfloat16"}), block_size=32, batch_tokens=512)
    if name.split(":")[0] == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device {name}: this torch sees no GPU.", hint='Use device="cpu", or repair the driver.')
        kind = "rocm" if torch.version.hip else "cuda"
        return Device(kind, torch.device(name), frozenset(DTYPES), block_size=16, batch_tokens=2048)
    raise ConfigError(f"unknown device {name!r}.", hint="Use auto, cpu, cuda or cuda:N.")


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Asks the kernel to place a tensor's memory in huge pages, and returns the tensor. The processor then looks up
    fewer addresses.

    The tensor must be contiguous and not written yet. The function does nothing on a GPU, or for a tensor that is
    smaller than a huge page.
    """
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - begin
    if tensor.device.type == "cpu" and _MADV_HUGEPAGE is not None and size >= HUGE_PAGE_BYTES:
        _madvise(begin, size, _MADV_HUGEPAGE)  # advice that the kernel may refuse
    return tensor
