"""Reads and writes DCP's file format in a CheckpointStorage. Torch's own readers can open the files. Files are hashed
while they are written.
"""

from __future__ import annotations

import hashlib
import io
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from os import PathLike, fspath
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from raytide.actors.trainer.checkpoint.dcp.metadata import metadata_of
from raytide.actors.trainer.checkpoint.dcp.planner import narrow
from raytide.actors.trainer.checkpoint.manifest import METADATA, Checkpoint, FileRecord
from raytide.actors.trainer.checkpoint.storage import CheckpointStorage
from raytide.core.errors import CheckpointError
from raytide.core.io.storage import named_failures


class SaveCancelled(BaseException):
    """Raised when a save was cancelled. It derives from BaseException, because a handler of Exception would treat it as
    a storage failure.
    """


class DcpWriter(FileSystemWriter):
    """Writes one rank's files of a checkpoint into the folder `folder` of a storage. `records` has the size and hash of
    each written file. `raise_if_cancelled` is called before each write.
    """

    def __init__(self, store: CheckpointStorage, folder: str, raise_if_cancelled: Callable[[], None]) -> None:
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)
        self.records: dict[str, FileRecord] = {}
        self.fs: FileSystemBase = _Files(store, folder, self.records, raise_if_cancelled)  # type: ignore[assignment]
        self.path = folder


class DcpReader(StorageReader):
    """Reads a checkpoint. For each stored shard, it sends one request to the storage. Files are untrusted: nothing in
    them is executed.
    """

    def __init__(self, store: CheckpointStorage, checkpoint: Checkpoint) -> None:
        self._store, self._folder = store, checkpoint.name
        self._sizes = {name: file.size for name, file in checkpoint.manifest.files.items()}
        self._places: dict[MetadataIndex, Any] = {}

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self._open(METADATA) as stream:
            body = stream.read(self._sizes.get(METADATA, 0))
        return metadata_of(body, self._sizes, f"{self._store.url}/{self._folder}/{METADATA}")

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        reads_by_file: dict[str, dict[MetadataIndex, list[ReadItem]]] = defaultdict(lambda: defaultdict(list))
        for item in plan.items:
            reads_by_file[self._places[item.storage_index].relative_path][item.storage_index].append(item)
        for file, by_place in reads_by_file.items():
            with self._open(file) as stream:
                for index in sorted(by_place, key=lambda index: int(self._places[index].offset)):
                    _fill(self._read(stream, index), by_place[index], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        return True

    def _read(self, stream: BinaryIO, index: MetadataIndex) -> Tensor:
        place = self._places[index]
        stream.seek(place.offset)
        body = io.BytesIO(stream.read(place.length))
        try:
            stored = torch.load(body, map_location="cpu", weights_only=True)
            if not isinstance(stored, Tensor):
                raise TypeError(f"it is a {type(stored).__name__}")
        except Exception as error:  # torch.load raises RuntimeError, EOFError and many others for a bad file
            why = " ".join(str(error).split())[-300:]
            raise CheckpointError(
                f"{self._store.url}/{self._folder}/{place.relative_path} holds no tensor for {index.fqn}: {why}",
                hint="Delete the folder: the run then resumes from the previous checkpoint.",
            ) from None
        return stored

    @contextmanager
    def _open(self, file: str) -> Generator[BinaryIO, None, None]:
        path = f"{self._folder}/{file}"
        with named_failures(f"{self._store.url}/{path}"), self._store.read(path) as stream:
            yield stream


class _Files(FileSystemBase):
    def __init__(
        self,
        store: CheckpointStorage,
        folder: str,
        records: dict[str, FileRecord],
        raise_if_cancelled: Callable[[], None],
    ) -> None:
        self._store, self._folder, self._records, self._raise_if_cancelled = store, folder, records, raise_if_cancelled
        self._held: dict[str, bytes] = {}
        """Small files that DCP renames when complete. Object stores cannot rename, so they are held in memory until
        then."""

    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        name = fspath(path)
        if name.endswith(".tmp"):
            body = _HeldFile()
            yield body
            self._held[name] = body.getvalue()
            return
        with named_failures(f"{self._store.url}/{name}"), self._store.write(name) as stream:
            hashing = _HashingStream(stream, self._raise_if_cancelled)
            yield hashing
        self._records[name.removeprefix(f"{self._folder}/")] = hashing.record()

    def rename(self, path: str | PathLike[str], new_path: str | PathLike[str]) -> None:
        with self.create_stream(new_path, "wb") as stream:
            cast(_HashingStream, stream).write(self._held.pop(fspath(path)))

    def concat_path(self, path: str | PathLike[str], suffix: str) -> str:
        return f"{fspath(path)}/{suffix}"

    def init_path(self, path: str | PathLike[str]) -> str:
        return fspath(path)

    def mkdir(self, path: str | PathLike[str]) -> None:
        pass

    def exists(self, path: str | PathLike[str]) -> bool:
        return False  # no other save writes to this folder

    def rm_file(self, path: str | PathLike[str]) -> None:
        raise FileNotFoundError(fspath(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        return True


class _HeldFile(io.BytesIO):
    def close(self) -> None:
        """Does nothing: DCP closes the file before its content is read."""


class _HashingStream(io.RawIOBase):
    def __init__(self, stream: BinaryIO, raise_if_cancelled: Callable[[], None]) -> None:
        self._stream, self._raise_if_cancelled = stream, raise_if_cancelled
        self._digest, self._size = hashlib.sha256(), 0

    def write(self, chunk: Any) -> int:
        self._raise_if_cancelled()
        self._digest.update(chunk)
        self._stream.write(chunk)
        self._size += memoryview(chunk).nbytes
        return memoryview(chunk).nbytes

    def tell(self) -> int:
        return self._size

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        """Does nothing: the storage closes its stream itself when the file is complete."""

    def record(self) -> FileRecord:
        return FileRecord(sha256=self._digest.hexdigest(), size=self._size)


def _fill(stored: Tensor, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
    for item in items:
        part = narrow(stored, item.storage_offsets, item.lengths)
        planner.resolve_tensor(item).copy_(part)
