"""A directory that is written whole or not at all, at a path or an fsspec URL."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from safetensors import SafetensorError

from raytide.core.errors import RaytideError, StorageError
from raytide.core.io.storage import full_disk_is_an_error, is_local

__all__ = ["AtomicDirectory"]

_CONFIGS = ("config.json", "adapter_config.json")


class AtomicDirectory:
    """Written under a hidden name beside its target, which `publish` gives it; for a URL, in a local directory.

    A failure is kept until then, since other ranks may be in the middle of sending what is still to be written.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._folder: Path | None = None
        self._error: RaytideError | None = None

    def write(self, work: Callable[[Path], None]) -> None:
        """Do `work` on the folder, unless something failed before."""
        if self._error is not None:
            return
        try:
            with full_disk_is_an_error(self._target):
                self._folder = self._folder or self._new()
                work(self._folder)
        except SafetensorError as error:
            self._fail(StorageError(f"cannot write {self._target}: {error}.", hint="Free space there, then resume."))
        except RaytideError as error:
            self._fail(error)

    def publish(self, commit: Callable[[], AbstractContextManager[None]] = nullcontext) -> RaytideError | None:
        """Replace what is at the target, inside `commit`, or say what failed: the target is then as it was."""
        try:
            with commit():
                self.write(self._replace if is_local(self._target) else self._upload)
        except RaytideError as error:
            self._fail(error)
        return self._error

    def _new(self) -> Path:
        if not is_local(self._target):
            return Path(tempfile.mkdtemp(prefix="raytide-export-"))
        target = Path(self._target)
        folder = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")
        folder.mkdir(parents=True)
        return folder

    def _replace(self, folder: Path) -> None:
        target = Path(self._target)
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)

    def _upload(self, folder: Path) -> None:
        """Object stores have no rename: the config, without which nothing is a model, comes last."""
        from raytide.core.io.storage import open_url

        fs, path = open_url(self._target)
        if fs.exists(path):
            fs.rm(path, recursive=True)
        for file in sorted(folder.iterdir(), key=lambda each: (each.name in _CONFIGS, each.name)):
            fs.put_file(str(file), f"{path}/{file.name}")
        shutil.rmtree(folder)

    def _fail(self, error: RaytideError) -> None:
        self._error = error
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
