"""The C operators as a shared library. The system's compiler builds it at first use, and a per-user cache keeps it.

The file's name is a hash of sources, flags and processor, so a library of another version or machine is never loaded.
The file ends with a digest of its content, so a damaged library is never loaded. The library uses the threads of the
OpenMP runtime that torch has loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from raytide.core.config import environment

_log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "c"
_FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math")
_COMPILERS = ("cc", "gcc", "clang")
_BUILD_TIMEOUT_S = 600.0  # 20 on a free core, and 120 were too few on a busy machine
_DIGEST_BYTES = 32

_P, _I, _F, _B = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "threads": (None, (_P, ctypes.c_uint)),
    "packed_words": (_I, (_I, _I, _B)),
    "pack": (None, (_P, _P, _I, _I, _B)),
    "linear": (None, (_P, _P, _P, _P, _I, _I, _I, _B)),
    "instructions": (ctypes.c_char_p, ()),
    "quantized_bytes": (_I, (_P,)),
    "pack_quantized": (None, (_P, _P, _P, _P)),
    "quantized_linear": (_B, (_P, _P, _P, _I, _B)),
    "norm": (None, (_P, _P, _P, _P, _P, _I, _I, _F, _B, _B)),
    "rope_write": (None, (_P, _P, _P, _P, _P, _P, _P, _P, _I, _I, _I, _I, _I, _I, _F, _B, _B)),
    "activate": (None, (_P, _P, _I, _I, _B, _B, _B)),
    "attends": (_B, (_I, _I, _I)),
    "attention": (_B, (_P, _P, _P, _P)),
    "layers": (_B, (_P,)),
}


class Library:
    """The loaded C library. Each of its functions is an attribute."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._library, f"raytide_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self._parallel = _openmp_entry()
        self.use_threads(torch.get_num_threads())

    def use_threads(self, count: int) -> None:
        self._num_threads = count
        self.threads(self._parallel, count)

    def follow_threads(self) -> None:
        """Sets the library's number of threads to the number that torch uses now."""
        count = torch.get_num_threads()
        if count != self._num_threads:
            self.use_threads(count)

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:  # what __init__ set, for the type checker
        raise AttributeError(name)


@functools.cache
def library() -> Library | None:
    """Returns the C library, and builds it if necessary. If that fails, logs a warning and returns None."""
    try:
        return Library(build(_cache_folder()))
    except (OSError, RuntimeError, subprocess.SubprocessError, AttributeError) as error:  # Runtime: no home folder
        detail = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        _log.warning("no C operators, torch's are used instead: %s", detail[0] if detail else repr(error))
        return None


def compiler() -> str | None:
    """Returns the path of the machine's C compiler, or None if there is none."""
    return next(filter(None, map(shutil.which, _COMPILERS)), None)


def build(folder: Path) -> Path:
    """Builds the library in `folder` if its file is missing there, and returns the path of the file. Raises OSError or
    SubprocessError.

    Concurrent builds are safe: each process builds a file of its own and moves it into place.
    """
    sources = _sources()
    path = folder / f"raytide-{operators_key()}.so"
    if _is_whole(path):
        return path
    if (found := compiler()) is None:
        raise FileNotFoundError(f"none of {', '.join(_COMPILERS)} is installed")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fresh = Path(scratch) / "built.so"
        units = [str(source) for source in sources if source.suffix == ".c"]
        subprocess.run(
            [found, *_FLAGS, f"-I{_SOURCES}", *units, "-o", str(fresh), "-lm"],
            check=True,
            capture_output=True,
            text=True,
            timeout=_BUILD_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
        body = fresh.read_bytes()
        fresh.write_bytes(body + hashlib.sha256(body).digest())  # the loader ignores what follows the sections
        fresh.chmod(0o700)
        fresh.replace(path)
    return path


def operators_key() -> str:
    """Returns a hash of the operators' sources, the compiler flags and the processor. With another key, sums may round
    differently.
    """
    digest = hashlib.sha256(" ".join((*_FLAGS, platform.machine(), _processor())).encode())
    for source in _sources():
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:32]


def _sources() -> list[Path]:
    return sorted(_SOURCES.rglob("*.[ch]"))


def _processor() -> str:
    """Returns the properties of the processor that -march=native depends on, as text."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))


def _is_whole(path: Path) -> bool:
    """Returns whether the file exists, belongs to this user, is not writable by others, and has not changed since it
    was built.
    """
    try:
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            return False
        body = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(body[:-_DIGEST_BYTES]).digest() == body[-_DIGEST_BYTES:]


def _cache_folder() -> Path:
    """Returns the folder that RAYTIDE_KERNEL_CACHE names, else one in the user's cache."""
    chosen = environment("KERNEL_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "raytide" / "kernels"


def _openmp_entry() -> int | None:
    """Returns the address of GOMP_parallel in this process's OpenMP runtime; None if no runtime has it."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    files = sorted({line.split(maxsplit=5)[-1] for line in lines if line.endswith((".so", ".so.1", ".so.5"))})
    torch_first = sorted((f for f in files if "omp" in Path(f).name), key=lambda f: "torch" not in f)
    for file in torch_first:
        try:
            return ctypes.cast(ctypes.CDLL(file).GOMP_parallel, ctypes.c_void_p).value
        except (AttributeError, OSError):
            continue
    return None
