"""The KV cache's tier on local disk. Prefix blocks are written to disk when their memory is needed. They are read back
when a prompt contains them and reading is cheaper than computing.

Separate threads write and read, so that the engine's thread never waits for the disk. A failure turns the tier off with
a warning. No request fails.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue

import numpy as np

from raytide.actors.engine.kv_cache.block_folder import BlockFolder
from raytide.actors.engine.kv_cache.handle import Bytes
from raytide.actors.engine.kv_cache.kv_cache import KvCache
from raytide.actors.engine.sequence import StepPlan
from raytide.actors.engine.types import DiskCounts
from raytide.core.errors import ConfigError

_log = logging.getLogger(__name__)

_MOST_UNWRITTEN_BYTES = 256 << 20
"""The most bytes of blocks in memory that wait to be written; further blocks are not written."""
_HANG_S = 10.0
"""A read that takes this many seconds more than expected is abandoned, and the tier is turned off."""
_NEWEST, _RECOVERY = 0.3, 0.001
"""The weight of a new measurement in the average speed, and the share by which each decision against reading moves the
assumed speed towards the best one, so that a disk that was slow for a while is tried again.
"""
_WAIT_S = 0.01
"""The seconds for which a step without work waits for the disk; commands may be delayed by as much."""
_LEAST_TOKENS = 64
"""The least number of prompt tokens in a step from whose time the cost of computing a token is learned."""


@dataclass(slots=True, eq=False)
class DiskRead:
    """A read of a prompt's blocks from disk. `hashes` are the hashes of the requested blocks. `blocks` are the blocks
    read so far, in the same order and without a gap.
    """

    key: bytes
    hashes: list[bytes]
    expected_s: float
    began_s: float
    blocks: list[tuple[bytes, Bytes]] = field(default_factory=list)
    is_over: bool = False


class DiskTier:
    """Writes and reads the blocks of one engine on disk. All methods are for the engine's thread. `clock` returns the
    time in seconds.

    A block has `block_tokens` tokens. As measured at the start, computing a token takes `token_s` seconds, and reading
    a byte takes `byte_s` seconds.
    """

    def __init__(
        self,
        folder: BlockFolder,
        *,
        block_tokens: int,
        token_s: float,
        byte_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._block_tokens, self._clock = folder, block_tokens, clock
        self._token_s, self._byte_s, self._best_byte_s = token_s, byte_s, byte_s
        self.is_on = True
        self._unwritten: set[bytes] = set()
        self._wanted = 0  # accepted and not written yet
        self._reads: dict[bytes, DiskRead] = {}  # in flight, by key
        self._reading: dict[bytes, bytes] = {}  # the key of the read that brings a block
        self._done: deque[DiskRead] = deque()
        self._some_done = threading.Event()
        self._count = 0
        self._counts = DiskCounts()
        self._earlier = (0, 0)  # evictions and damaged blocks of folders before this one
        self._writer, self._reader = Worker("raytide-kv-writer"), Worker("raytide-kv-reader")

    @property
    def counts(self) -> DiskCounts:
        folder, (evictions, damaged) = self._folder, self._earlier
        return replace(
            self._counts,
            path=str(folder.path),
            is_on=self.is_on,
            bytes=folder.num_bytes,
            evictions=evictions + folder.evictions,
            damaged_blocks=damaged + folder.damaged,
        )

    def change_folder(self, opened: Callable[[], BlockFolder]) -> None:
        """Changes to another folder, for other weights. If the folder cannot be opened, turns the tier off."""
        before = self._folder
        before.release()
        self._unwritten = set()
        try:
            self._folder = opened()
        except (OSError, ConfigError) as error:
            self._turn_off(str(error))
        else:
            evictions, damaged = self._earlier
            self._earlier = evictions + before.evictions, damaged + before.damaged

    def wants(self, block_hash: bytes) -> bool:
        """Returns whether a block whose memory is about to be reused should be written to disk."""
        if not self.is_on or block_hash in self._unwritten:
            return False
        if block_hash in self._folder:
            self._folder.touch(block_hash)
            return False
        if (len(self._unwritten) + self._wanted) * self._folder.file_bytes >= _MOST_UNWRITTEN_BYTES:
            self._counts.skipped_blocks += 1
            return False
        is_worth = self._is_worth(1, queued=0)
        self._wanted += is_worth
        return is_worth

    def write(self, hashes: Items[bytes], layers: Items[Bytes]) -> None:
        """Queues blocks for writing to disk. Call it only for blocks for which `wants` has returned True. `layers` is
        the result of `KvCache.read` for these blocks.
        """
        rows = [layer.reshape(len(hashes), -1) for layer in layers]
        folder, unwritten = self._folder, self._unwritten
        unwritten.update(hashes)
        self._wanted = 0
        for index, block_hash in enumerate(hashes):
            self._writer.run(partial(self._write, folder, unwritten, block_hash, [row[index] for row in rows]))

    def forget(self, block_hash: bytes) -> None:
        """Removes a block whose content cannot be trusted."""
        self._writer.run(partial(self._folder.forget, block_hash))

    def on_its_way(self, block_hash: bytes) -> bytes | None:
        """Returns the key of the read in progress that contains a block, or None if no read contains it."""
        return self._reading.get(block_hash)

    def num_readable(self, hashes: Items[bytes]) -> int:
        """Returns the number of blocks at the start of `hashes` that the disk tier would now provide. The number
        includes blocks that are being read now, and blocks that a call of `read` would read. The files are not touched.
        """
        found = list[bytes]()
        for block_hash in hashes if self.is_on else ():
            if block_hash not in self._folder and block_hash not in self._reading:
                break
            found.append(block_hash)
        missing = sum(block_hash not in self._reading for block_hash in found)
        return len(found) if self._is_cheaper(missing, self._queued()) else len(found) - missing

    def read(self, hashes: Items[bytes]) -> bytes | None:
        """Starts to read these blocks in order. The read ends before the first block that is not on disk, or that
        another read in progress contains. Returns the key of the read. If computing the blocks is cheaper, or if there
        is no block to read, starts no read and returns None.
        """
        found = list[bytes]()
        for block_hash in hashes if self.is_on else ():
            if block_hash not in self._folder or block_hash in self._reading:
                break
            found.append(block_hash)
        queued = self._queued()
        if not found or not self._is_worth(len(found), queued):
            return None
        self._count += 1
        read = DiskRead(b"read%d" % self._count, found, self._expected_s(len(found) + queued), self._clock())
        self._reads[read.key] = read
        self._reading.update((block_hash, read.key) for block_hash in found)
        self._reader.run(partial(self._read, self._folder, read))
        return read.key

    def finished(self) -> list[DiskRead]:
        """Returns the reads that have ended since the last call. If a read hangs, the tier is turned off and the read
        is returned without blocks.
        """
        now_s, ended = self._clock(), list[DiskRead]()
        self._some_done.clear()
        while self._done:
            ended.append(self._done.popleft())
        for read in self._reads.values():
            if read not in ended and now_s > read.began_s + _HANG_S + 4 * read.expected_s:
                self._turn_off(f"a read takes longer than {now_s - read.began_s:.0f} s")
                ended.append(DiskRead(read.key, read.hashes, 0.0, 0.0))
        ended = [read for read in ended if self._reads.pop(read.key, None) is not None]
        for read in ended:
            for block_hash in read.hashes:
                self._reading.pop(block_hash, None)
        return ended

    def cancel(self) -> list[bytes]:
        """Abandons all reads and returns their keys."""
        keys = list(self._reads)
        self._reads, self._reading = {}, {}
        return keys

    def note_hits(self, num_blocks: int) -> None:
        self._counts.hit_tokens += num_blocks * self._block_tokens

    def after_step(self, plan: StepPlan, seconds: float) -> bool:
        """Updates the estimated time to compute one token, if the step mostly computed prompts. The step took
        `seconds`.

        If the step had nothing to compute but reads are in progress, waits a few milliseconds for a read and returns
        True. Otherwise returns False.
        """
        tokens = sum(chunk.length for chunk in plan.chunks if chunk.length > 1 and not chunk.draft)
        if tokens >= _LEAST_TOKENS and 2 * tokens > plan.num_tokens:
            self._token_s += _NEWEST * (seconds / plan.num_tokens - self._token_s)
        if plan.chunks or not self._reads:
            return False
        self._some_done.wait(_WAIT_S)
        return True

    def flush(self, timeout_s: float) -> None:
        """Waits until all blocks queued so far are written, for at most `timeout_s` seconds."""
        if self.is_on:
            self._writer.wait(timeout_s)

    def close(self) -> None:
        """Ends the threads and unlocks the folder. Blocks that are not written yet are lost. Idempotent."""
        self.is_on = False
        self._writer.end()
        self._reader.end()
        self._folder.release()

    def _queued(self) -> int:
        """Returns the number of blocks in reads that have not ended."""
        return sum(len(read.hashes) for read in self._reads.values() if not read.is_over)

    def _is_cheaper(self, num_blocks: int, queued: int) -> bool:
        """Returns whether reading blocks after `queued` other blocks takes less time than computing them."""
        return self._expected_s(num_blocks + queued) < num_blocks * self._block_tokens * self._token_s

    def _is_worth(self, num_blocks: int, queued: int) -> bool:
        """Returns the result of `_is_cheaper`. If it is False, the assumed speed of the disk moves slightly towards its
        best one, so that a disk that was slow for a while is tried again.
        """
        if self._is_cheaper(num_blocks, queued):
            return True
        self._byte_s += _RECOVERY * (self._best_byte_s - self._byte_s)
        return False

    def _expected_s(self, num_blocks: int) -> float:
        return num_blocks * self._folder.file_bytes * self._byte_s

    def _write(self, folder: BlockFolder, unwritten: set[bytes], key: bytes, parts: list[Bytes]) -> None:
        try:
            if self.is_on:
                folder.write(key, parts)
        except OSError as error:
            self._turn_off(str(error))
        finally:
            unwritten.discard(key)

    def _read(self, folder: BlockFolder, read: DiskRead) -> None:
        began = time.perf_counter()
        try:
            for block_hash in read.hashes if self.is_on else ():
                content = folder.read(block_hash)
                if content is None:
                    break
                read.blocks.append((block_hash, content))
            size = len(read.blocks) * folder.file_bytes
            if size:
                self._byte_s += _NEWEST * ((time.perf_counter() - began) / size - self._byte_s)
                self._best_byte_s = min(self._best_byte_s, self._byte_s)
        except OSError as error:
            self._turn_off(str(error))
        finally:
            read.is_over = True
            self._done.append(read)
            self._some_done.set()

    def _turn_off(self, why: str) -> None:
        if self.is_on:
            self.is_on = False
            _log.warning("the KV cache on local disk %s is off: %s", self._folder.path, why)


def move_blocks(plan: StepPlan, cache: KvCache, disk: DiskTier | None) -> None:
    """Moves a plan's blocks between device, host and disk. Call it once, before the plan's chunks are computed."""
    if disk is None:
        cache.move(plan)
        return
    if plan.disk_out:
        blocks, hashes = zip(*plan.disk_out, strict=True)
        disk.write(hashes, cache.read(blocks))
    if not plan.disk_in:
        cache.move(plan)
        return
    cache.move(StepPlan(swap_out=plan.swap_out, swap_in=plan.swap_in))
    contents, blocks = zip(*plan.disk_in, strict=True)
    cuts = np.cumsum(cache.block_bytes)[:-1]
    parts = [np.split(content, cuts) for content in contents]
    cache.write(blocks, [np.concatenate(layer) for layer in zip(*parts, strict=True)])
    cache.move(StepPlan(copies=plan.copies))


class Worker:
    """A thread that runs tasks one after the other. The thread ends when this object is garbage-collected."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True).start()
        self._finish = weakref.finalize(self, self._tasks.put, None)

    def run(self, task: Callable[[], None]) -> None:
        if self._finish.alive:
            self._tasks.put(task)

    def wait(self, timeout_s: float) -> bool:
        """Waits until all tasks given so far are done, for at most `timeout_s` seconds. Returns whether all of them are
        done.
        """
        done = threading.Event()
        self.run(done.set)
        return not self._finish.alive or done.wait(timeout_s)

    def end(self) -> None:
        """Ends the thread after it has finished all tasks that were already given to `run`. Idempotent."""
        self._finish()


def _work(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        try:
            task()
        except Exception:
            _log.exception("the KV cache on local disk: a task failed")
        del task
