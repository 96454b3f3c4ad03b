"""Checks the local files that a spec names, before the job or endpoint is queued.

For URLs, only the form is checked. If a URL does not exist, the driver reports it later. Local files are checked in
separate threads with a timeout, so a hanging file system blocks only these threads. After a timeout, the spec is
accepted unchecked. There is one exception: an endpoint is refused if the check for private paths times out.

The API may read more files than teams may. Therefore the API tells a caller with a team's token only about files
that every user of the machine can read. The driver later reports problems with other files. Only regular files are
opened.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from raytide.control.api.auth import ANY_TEAM, Caller
from raytide.core.errors import ConflictError, DataError, RaytideError
from raytide.core.io.private_paths import check_named
from raytide.core.io.storage import check_url, join, local_path
from raytide.core.io.token_dataset import ITEM_BYTES, MANIFEST, parse_manifest
from raytide.core.specs.data import DataSpec
from raytide.core.specs.train import TrainSpec

CHECK_TIMEOUT_S = 3.0
"""The timeout of one check, in seconds."""
THREADS = 4
_FREE_S = 0.2
"""The longest wait for a free thread, because threads of a hanging file system stay busy."""
_MOST_BYTES = 2**24
"""The largest manifest read here; the driver reads larger ones."""
_MOST_WEIGHTS = 1 << 50
"""The bytes above which the total size in a model's index counts as unknown."""
T = TypeVar("T")
_NO_FILES = ("/proc/", "/sys/", "/dev/")
"""Folders whose entries look like files but may block or have effects when read."""
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EINVAL})


@dataclass(frozen=True, slots=True)
class FileCheck:
    """The result of checking a path. If nothing is known about the path, or nothing may be revealed, all fields have
    their defaults.
    """

    content: bytes | None = None
    is_missing: bool = False
    size: int = 0


_UNKNOWN = FileCheck()


class Inputs:
    """Checks the files that specs name, in a limited number of threads of this API process."""

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(THREADS)

    def check_private(self, config: object, where: str, *, is_checked_later: bool) -> None:
        """Raises DeniedError if `config` names a private path. Error messages refer to the config as `where`.

        The check runs in a thread, because resolving links may hang. If the check times out, the method raises
        DataError. With `is_checked_later`, a timeout is no error, because the driver checks the paths later.
        """

        def check() -> bool:
            check_named(config, where, links=not is_checked_later)
            return True

        if not self._run(check) and not is_checked_later:
            raise DataError(f"the paths of {where} cannot be checked now.", hint="Try again, or use other paths.")

    def check_training(self, spec: TrainSpec, caller: Caller) -> None:
        """Raises DataError if a dataset is missing or malformed, the chat file is missing, or a URL is not allowed."""
        tokenizer, template = (spec.chat.tokenizer, spec.chat.template) if spec.chat else (None, None)
        config = spec.model.config if isinstance(spec.model.config, str) else None
        held_out = spec.eval.dataset if spec.eval else None
        datasets = (*spec.datasets, *([held_out] if held_out else []))
        for url in (*datasets, spec.out, spec.checkpoint_dir, spec.init_from, tokenizer, template, config):
            if url is not None:
                check_url(url)
        for dataset in datasets:
            found = self._look(where := join(dataset, MANIFEST), caller)
            if found.is_missing:
                raise DataError(
                    f"{dataset} is not a token dataset: it has no {MANIFEST}.",
                    hint="Build it with `raytide data build`; an interrupted build leaves none.",
                )
            if found.content is not None:
                parse_manifest(found.content, where)
        if spec.chat is not None:
            check_url(spec.chat.file)
            if self._look(spec.chat.file, caller, most=0).is_missing:
                raise DataError(f"{spec.chat.file} does not exist.", hint="Check chat.file.")

    def training_inputs(self, spec: TrainSpec, caller: Caller) -> dict[str, int]:
        """Returns the sizes in bytes of a training's datasets and initial model, by URL.

        Inputs whose size the API does not know are left out.
        """
        found = {dataset: self._dataset_bytes(dataset, caller) for dataset in spec.datasets}
        if spec.init_from is not None:
            found[spec.init_from] = self.weight_bytes(spec.init_from, caller)
        return {url: size for url, size in found.items() if size}

    def _dataset_bytes(self, dataset: str, caller: Caller) -> int:
        content = self._look(where := join(dataset, MANIFEST), caller).content
        if content is None:
            return 0
        manifest = parse_manifest(content, where)
        return manifest.tokens * ITEM_BYTES[manifest.dtype]

    def training_config(self, spec: TrainSpec, caller: Caller) -> dict[str, object] | None:
        """Returns the `config.json` of the model that a spec trains, or None if the API cannot read it."""
        data: dict[str, object] = {}
        first = next(iter(spec.datasets), None)
        if first is not None and (content := self._look(join(first, MANIFEST), caller).content):
            manifest = parse_manifest(content, first)
            data = {"vocab_size": manifest.vocab_size, "eos_token_id": manifest.eos_id}
        given = spec.model.config
        if given is None and spec.init_from is None:
            vocab = spec.model.vocab_size or data.get("vocab_size")
            return spec.model.hf_config(vocab, 0) if isinstance(vocab, int) else None
        if isinstance(given, dict) and spec.init_from is None:
            return {**data, **given}
        folder = spec.init_from if spec.init_from is not None else str(given)
        for path in (join(folder, "config.json"), join(folder, "model/config.json"), folder):
            try:
                body = json.loads(self._look(path, caller).content or b"")
            except (ValueError, RecursionError):
                continue
            if isinstance(body, dict):
                return {**data, **body, **(given if isinstance(given, dict) else {})}
        return None

    def check_build(self, spec: DataSpec) -> None:
        """Raises DataError if a URL is not allowed. The input files are not looked up here. The driver lists them,
        because there may be many.
        """
        beside = spec.cleaning.urls if spec.cleaning else ()
        for url in (*spec.inputs, spec.out, *([spec.tokenizer.file] if spec.tokenizer.file else []), *beside):
            check_url(url)

    def check_model(self, model: str, caller: Caller, adapters: Iterable[str] = ()) -> None:
        """Raises DataError if `model` is a local path without a model, or if `adapters` names a local path without an
        adapter. Also raises DataError for a URL that is not allowed, and for a GGUF file in an object store.

        A model in PACKAGED_MODELS is part of a Python package that only the nodes need. Such a model is not checked
        here.
        """
        from raytide.actors.models.quantized.gguf.gguf_file import is_gguf
        from raytide.actors.models.quantized.gguf.packaged_models import PACKAGED_MODELS

        named = [(each, "an adapter's directory", join(each, "adapter_config.json")) for each in adapters]
        if is_gguf(model):
            if local_path(model) is None:
                raise DataError(f"{model} is a GGUF file in a store.", hint="Copy it to a path that every node reads.")
            named.append((model, "a GGUF file", model))
        elif model not in PACKAGED_MODELS:
            named.append((model, "a model directory", join(model, "config.json")))
        for location, kind, file in named:
            check_url(location)
            if self._look(file, caller, most=0).is_missing:
                lacks = "it does not exist" if file == location else f"it has no {Path(file).name}"
                raise DataError(f"{location} is not {kind}: {lacks}.", hint="Use an exported one.")

    def weight_bytes(self, model: str, caller: Caller) -> int:
        """Returns the size in bytes of a model's weights on disk, or 0 if the API does not know the size."""
        from raytide.actors.models.quantized.gguf.gguf_file import is_gguf

        if is_gguf(model):
            return self._look(model, caller, most=0).size
        index = self._look(join(model, "model.safetensors.index.json"), caller).content
        if index is None:
            return self._look(join(model, "model.safetensors"), caller, most=0).size
        try:
            size = json.loads(index)["metadata"]["total_size"]
        except (ValueError, RecursionError, KeyError, TypeError):
            return 0
        return size if isinstance(size, int) and 0 < size < _MOST_WEIGHTS else 0

    def check_weights(self, model: str, weights: str, caller: Caller) -> None:
        """Raises DataError if `weights` is not a model. Raises ConflictError if its architecture is known to differ
        from that of `model`.
        """
        from raytide.actors.models.families import architecture_of, is_same_architecture

        self.check_model(weights, caller)
        read = [self._look(join(each, "config.json"), caller).content for each in (model, weights)]
        try:
            ours, theirs = (architecture_of(json.loads(content or b""), model) for content in read)
        except (RaytideError, ValueError, RecursionError, AttributeError, TypeError):
            return  # replicas compare what cannot be read here
        if not is_same_architecture(theirs, ours):
            raise ConflictError(
                f"{weights} holds a model of another architecture than {model}.",
                hint="Serve it as a model of its own, or by a rollout.",
            )

    def check_registered(self, model: str, caller: Caller) -> None:
        """Raises DataError if a local path that is to be registered is neither a model nor an adapter."""
        adapter = self._look(join(model, "adapter_config.json"), caller, most=0)
        if adapter.is_missing:
            self.check_model(model, caller)

    def _look(self, url: str, caller: Caller, most: int = _MOST_BYTES) -> FileCheck:
        """Returns the check of a local file, with the file's content if it has at most `most` bytes.

        Returns an empty check for a URL or on a timeout.
        """
        path = local_path(url)
        if path is None:
            return _UNKNOWN
        return self._run(lambda: check_file(path, most, for_everybody=caller.team != ANY_TEAM)) or _UNKNOWN

    def _run(self, work: Callable[[], T]) -> T | None:
        """Runs `work` in a daemon thread, which cannot delay this process's exit. Returns its result or raises its
        exception; None on a timeout."""
        if not self._free.acquire(timeout=_FREE_S):
            return None
        found: Future[T] = Future()

        def run() -> None:
            try:
                found.set_result(work())
            except BaseException as error:
                found.set_exception(error)
            finally:
                self._free.release()

        threading.Thread(target=run, name="look at a file", daemon=True).start()
        try:
            return found.result(CHECK_TIMEOUT_S)
        except TimeoutError:
            return None


def check_file(path: str, most: int, *, for_everybody: bool) -> FileCheck:
    """Returns a file's content (if it has at most `most` bytes), its size in bytes, and whether it is missing.

    With `for_everybody`, the result reveals only what every user of the machine can see.
    """
    try:
        real = os.path.realpath(path)
        if real.startswith(_NO_FILES) and not real.startswith("/dev/shm/"):  # only read  # nosec B108
            return FileCheck(is_missing=True)
        if for_everybody and not _is_reachable(real):
            return _UNKNOWN
        about = os.stat(real)
        if not stat.S_ISREG(about.st_mode):
            return FileCheck(is_missing=True)
        if for_everybody and not about.st_mode & stat.S_IROTH:
            return _UNKNOWN
        return FileCheck(_read(real, most, for_everybody=for_everybody), size=about.st_size)
    except OSError as error:
        return FileCheck(is_missing=error.errno in _MISSING)
    except ValueError:  # not a path
        return FileCheck(is_missing=True)


def _is_reachable(real: str) -> bool:
    """Returns whether every user may enter all existing parent folders."""
    for folder in reversed(Path(real).parents):
        try:
            about = os.stat(folder)
        except FileNotFoundError:
            return True
        if not stat.S_ISDIR(about.st_mode):
            return True
        if not about.st_mode & stat.S_IXOTH:
            return False
    return True


def _read(real: str, most: int, *, for_everybody: bool) -> bytes | None:
    """Returns the content; None if it is larger than `most`, or if the file was replaced meanwhile."""
    if not most:
        return None
    descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode) or (for_everybody and not mode & stat.S_IROTH):
            return None
        content = file.read(most + 1)
    return content if len(content) <= most else None
