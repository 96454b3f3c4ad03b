"""fsspec's local file system with an additional check. Each file is checked again after it is opened, because a link in
its path may have changed after the path was checked.

Import this module lazily: importing fsspec is slow.
"""

from __future__ import annotations

import os
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from raytide.core.errors import DeniedError
from raytide.core.io.private_paths import check_path


class GuardedFiles(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> Any:
        check_path(str(path))
        file = super()._open(path, mode=mode, block_size=block_size, **kwargs)
        if "r" in mode:
            try:
                check_path(os.readlink(f"/proc/self/fd/{file.fileno()}"), path)
            except DeniedError:
                file.close()
                raise
        return file
