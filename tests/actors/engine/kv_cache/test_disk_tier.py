"""The disk tier decides by what was measured, and gives itself up before it gives up a request."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.actors.engine.life import sequence

from raytide.actors.engine.kv_cache.block_folder import BlockFolder
from raytide.actors.engine.kv_cache.disk_tier import DiskRead, DiskTier
from raytide.actors.engine.kv_cache.handle import Bytes
from raytide.actors.engine.sequence import ScheduledChunk, StepPlan

SIZE = 80
FILE = SIZE + 48
TOKENS = 4
KEYS = [bytes([index]) * 16 for index in range(8)]


def tier(root: Path, *, token_s: float = 1.0, byte_s: float = 1e-3, now_s: list[float] | None = None) -> DiskTier:
    folder, clock = BlockFolder(root, "kv-a", SIZE, 100 * FILE), now_s or [0.0]
    return DiskTier(folder, block_tokens=TOKENS, token_s=token_s, byte_s=byte_s, clock=lambda: clock[0])


def write(disk: DiskTier, keys: list[bytes]) -> None:
    assert [disk.wants(key) for key in keys] == [True] * len(keys)
    disk.write(keys, [np.arange(len(keys) * SIZE // 2, dtype=np.uint8) for _ in range(2)])
    disk.flush(60.0)


def ended(disk: DiskTier) -> DiskRead:
    while True:
        for read in disk.finished():
            return read
        disk.after_step(StepPlan(), 0.0)


def test_blocks_come_back_in_the_order_of_the_prompt_up_to_the_first_gap(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    write(disk, KEYS[:3])
    assert not disk.wants(KEYS[0]), "it is there"
    key = disk.read([*KEYS[:3], KEYS[5]])
    assert key is not None
    assert [disk.on_its_way(each) for each in KEYS[1:4]] == [key, key, None]
    read = ended(disk)
    assert (read.key, [each for each, _ in read.blocks]) == (key, KEYS[:3])
    half = SIZE // 2
    expected = [[*range(at, at + half)] * 2 for at in (0, half, 2 * half)]
    assert [content.tolist() for _, content in read.blocks] == expected
    assert disk.on_its_way(KEYS[1]) is None
    assert disk.read(KEYS[4:]) is None
    assert disk.counts.bytes == 3 * FILE


def test_reading_is_chosen_where_it_was_measured_to_be_cheaper(tmp_path: Path) -> None:
    byte_s = 1.01 * TOKENS / FILE  # a block takes as long as 4.04 tokens of a second each
    disk = tier(tmp_path, byte_s=0.5 * byte_s)
    write(disk, KEYS[:4])
    slow = tier(tmp_path / "slow", byte_s=byte_s)
    assert not slow.wants(KEYS[0]), "what is not worth reading is not worth writing"
    prompt = StepPlan([ScheduledChunk(sequence("p", [1] * 100, 1), 0, 100)])
    for _ in range(30):
        slow.after_step(prompt, 200.0)  # 2 s a token
    assert slow.wants(KEYS[0])
    for _ in range(30):
        disk.after_step(prompt, 1.0)
    assert disk.read(KEYS[:4]) is None, "computing has become faster"
    decodes = StepPlan([ScheduledChunk(sequence(f"d{i}", [1] * 9, 1), 8, 1) for i in range(100)])
    for _ in range(30):
        disk.after_step(decodes, 1e6)
    assert disk.read(KEYS[:4]) is None, "decodes say nothing about prompts"


def test_what_a_prompt_would_get_is_known_without_a_look_at_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, held = tier(tmp_path, byte_s=0.6 * TOKENS / FILE), threading.Event()
    write(disk, KEYS[:5])
    reads: list[bytes] = []
    plain = BlockFolder.read

    def slowly(self: BlockFolder, key: bytes) -> Bytes | None:
        reads.append(key)
        held.wait(60)
        return plain(self, key)

    monkeypatch.setattr(BlockFolder, "read", slowly)
    assert disk.num_readable([*KEYS[:3], KEYS[6], KEYS[3]]) == 3
    assert disk.num_readable(KEYS[6:]) == 0
    assert not reads
    assert disk.read(KEYS[:3]) is not None
    assert disk.num_readable(KEYS[:4]) == 3, "the fourth would wait for three others"
    held.set()
    ended(disk)
    assert disk.num_readable(KEYS[:4]) == 4
    slow = tier(tmp_path / "slow", byte_s=0.6 * TOKENS / FILE)
    write(slow, KEYS[:4])
    for _ in range(30):
        slow.after_step(StepPlan([ScheduledChunk(sequence("p", [1] * 100, 1), 0, 100)]), 0.0)
    before = slow._byte_s
    assert slow.num_readable(KEYS[:4]) == 0, "computing them is cheaper"
    assert slow._byte_s == before, "a question is no refusal, after which the disk is trusted more"
    disk.close()
    assert disk.num_readable(KEYS[:4]) == 0


def test_a_queue_of_reads_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, held = tier(tmp_path, byte_s=0.6 * TOKENS / FILE), threading.Event()
    write(disk, KEYS[:4])
    plain = BlockFolder.read

    def slowly(self: BlockFolder, key: bytes) -> Bytes | None:
        held.wait(60)
        return plain(self, key)

    monkeypatch.setattr(BlockFolder, "read", slowly)
    assert disk.read(KEYS[:3]) is not None
    assert disk.read(KEYS[3:4]) is None, "it would wait for three others"
    held.set()
    ended(disk)


def test_a_slow_spell_is_not_for_ever(tmp_path: Path) -> None:
    disk = tier(tmp_path, token_s=1e6)
    write(disk, KEYS[:1])
    disk.read(KEYS[:1])
    ended(disk)  # the real disk is much faster
    disk._byte_s, disk._token_s = 1e9, 1.0
    refusals = 0
    while disk.read(KEYS[:1]) is None:
        refusals += 1
    assert 1000 < refusals < 100_000
    ended(disk)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_turns_the_tier_off_and_leaves_nothing_half_written(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tier(tmp_path)
    write(disk, KEYS[:1])

    def fails(*_: object, **__: object) -> None:
        raise OSError(error, "it fails")

    monkeypatch.setattr("os.rename", fails)
    write(disk, KEYS[1:3])
    assert not disk.is_on and not disk.counts.is_on
    assert "is off: " in caplog.text and "it fails" in caplog.text
    assert not disk.wants(KEYS[3]) and disk.read(KEYS[:1]) is None
    assert len(list(Path(disk.counts.path).iterdir())) == 1


def test_a_read_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, held = [0.0], threading.Event()
    disk = tier(tmp_path, now_s=now_s)
    write(disk, KEYS[:1])
    monkeypatch.setattr(BlockFolder, "read", lambda *_: held.wait(60))
    key = disk.read(KEYS[:1])
    assert disk.finished() == []
    now_s[0] = 60.0
    (read,) = disk.finished()
    assert (read.key, read.blocks, disk.is_on) == (key, [], False)
    held.set()
    disk._reader.wait(60.0)
    assert disk.finished() == [], "it comes too late"


def test_memory_for_what_is_not_written_yet_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytide.actors.engine.kv_cache.disk_tier._MOST_UNWRITTEN_BYTES", 3 * FILE)
    disk, held = tier(tmp_path), threading.Event()
    disk._writer.run(lambda: (held.wait(60), None)[1])
    assert [disk.wants(key) for key in KEYS[:2]] == [True, True]
    disk.write(KEYS[:2], [np.zeros(2 * SIZE, np.uint8)])
    assert [disk.wants(key) for key in KEYS[1:5]] == [False, True, False, False]
    assert disk.counts.skipped_blocks == 2
    disk.write(KEYS[2:3], [np.zeros(SIZE, np.uint8)])
    held.set()
    disk.flush(60.0)
    assert disk.counts.bytes == 3 * FILE and disk.wants(KEYS[4])


def test_threads_and_the_folder_are_free_after_the_end(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    write(disk, KEYS[:1])
    disk.close()
    disk.close()
    again = tier(tmp_path)
    assert again.counts.path == disk.counts.path
    assert again.read(KEYS[:1]) is not None
    ended(again)
    del again
    names = {thread.name for thread in threading.enumerate()}
    for thread in threading.enumerate():
        if thread.name.startswith("raytide-kv"):
            thread.join(60.0)
            assert not thread.is_alive(), names
