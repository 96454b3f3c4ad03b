"""A directory that is written completely or not at all, at a path or an fsspec URL."""

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

_CONFIGS = ("config.json", "adapter_config.json")


class AtomicDirectory:
    """A directory that appears at its target as a whole or not at all.

    Written under a hidden name beside the target (for a URL, in a local directory), which `publish` replaces.

    An error is kept until then, since other ranks may still be sending tensors.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._folder: Path | None = None
        self._error: RaytideError | None = None

    def write(self, work: Callable[[Path], None]) -> None:
        """Run `work` on the folder, unless an earlier call failed."""
        if self._error is not None:
            return
        try:
            with full_disk_is_an_error(self._target):
                self._folder = self._folder or self._create_folder()
                work(self._folder)
        except SafetensorError as error:
            self._fail(StorageError(f"cannot write {self._target}: {error}.", hint="Free space there, then resume."))
        except RaytideError as error:
            self._fail(error)

    def publish(self, commit: Callable[[], AbstractContextManager[None]] = nullcontext) -> RaytideError | None:
        """Replace the target, inside `commit`. Returns the error if anything failed; the target is then unchanged."""
        try:
            with commit():
                self.write(self._replace if is_local(self._target) else self._upload)
        except RaytideError as error:
            self._fail(error)
        return self._error

    def _create_folder(self) -> Path:
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
        """Upload the files. Object stores have no rename, so the config, without which nothing is a model, is last."""
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
