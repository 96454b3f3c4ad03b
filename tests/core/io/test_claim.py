"""A folder has one writer at a time. A run that is over never blocks the next, and one that lost it commits nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from botocore.exceptions import EndpointConnectionError

from raytide.core.errors import ConflictError, StorageError
from raytide.core.io import claim as claims
from raytide.core.io.claim import Claim, ClaimRecord, committing, read_claim
from raytide.core.io.storage import open_url

Make = Callable[..., Claim]
FAST: dict[str, float] = {"beat_s": 0.05, "watch_s": 0.4}


@pytest.fixture(params=["folder", "url"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(claims, "SETTLE_S", 0.05)
    return str(tmp_path / "run") if request.param == "folder" else f"memory://claims/{tmp_path.name}"


@pytest.fixture
def claim() -> Iterator[Callable[..., Claim]]:
    made: list[Claim] = []

    def make(*places: str, **options: Any) -> Claim:
        made.append(Claim(places, **{**FAST, **options}))
        return made[-1]

    yield make
    for each in made:
        each.release()


def rewrite(place: str, **changes: object) -> None:
    """As a process elsewhere would have written it."""
    held = read_claim(place)
    assert held is not None
    body = {name: getattr(held, name) for name in ClaimRecord.__dataclass_fields__} | changes
    claims._write(place, ClaimRecord(**body))


def elsewhere(place: str, claim: Make, holder: str = "job-1") -> Claim:
    """A claim of a run on another machine, which beats as long as its object lives."""
    made = claim(place, holder=holder, beat_s=1000.0)
    rewrite(place, boot="another machine's", host="far", pid=1)
    return made


def test_a_second_run_is_refused_and_told_who_writes_there_and_since_when(place: str, claim: Make) -> None:
    claim(place, holder="job-1")
    with pytest.raises(
        ConflictError, match=rf"is being written by job-1 \(pid {os.getpid()} on .*, since \d{{4}}-"
    ) as caught:
        claim(place, holder="job-2")
    assert "another `out`" in caught.value.hint


def test_two_runs_of_one_process_are_two_runs(place: str, claim: Make) -> None:
    claim(place)
    with pytest.raises(ConflictError):
        claim(place)


def test_a_run_that_released_it_leaves_it_free(place: str, claim: Make) -> None:
    claim(place, holder="job-1").release()
    assert read_claim(place) is None
    assert claim(place, holder="job-2").epoch == 1


def test_the_same_job_takes_over_at_once_and_its_former_driver_commits_nothing(place: str, claim: Make) -> None:
    former = claim(place, holder="job-1")
    again = claim(place, holder="job-1", watch_s=1000.0)
    assert again.epoch == 2
    with pytest.raises(ConflictError, match="was taken over by job-1"), committing([place], former.token):
        raise AssertionError("it must not come to this")
    with committing([place], again.token):
        pass
    wait_until(lambda: former._lost is not None)
    with pytest.raises(ConflictError, match="no longer writes there"):
        former.check()
    former.release()
    with committing([place], again.token):
        pass


def test_a_job_that_is_over_does_not_block_although_its_process_still_runs(place: str, claim: Make) -> None:
    asked: list[str] = []

    def is_over(holder: str) -> bool:
        asked.append(holder)
        return True

    claim(place, holder="job-1")
    assert claim(place, holder="job-2", is_over=is_over, watch_s=1000.0).epoch == 2
    assert asked == ["job-1"]


def test_a_heartbeat_during_the_takeover_does_not_keep_the_folder_of_a_job_that_is_over(
    place: str, claim: Make
) -> None:
    former = claim(place, holder="job-1", beat_s=1000.0)

    def is_over(holder: str) -> bool:
        former._beat(former._made[0] if "memory://" not in place else place)
        return True

    assert claim(place, holder="job-2", is_over=is_over, watch_s=1000.0).epoch == 2


def test_a_heartbeat_that_was_begun_before_the_takeover_and_ends_after_it_does_not_undo_it(
    claim: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(claims, "SETTLE_S", 0.0)
    place, write, late = f"memory://claims/{tmp_path.name}", claims._write, list[ClaimRecord]()
    former = claim(place, holder="job-1", beat_s=1000.0)

    def overwritten(at: str, record: ClaimRecord) -> None:
        write(at, record)
        if not late:
            late.append(former._held[place])
            write(at, late[0])

    monkeypatch.setattr(claims, "_write", overwritten)
    again = claim(place, holder="job-1", beat_s=1000.0)
    with committing([place], again.token):
        pass
    with pytest.raises(ConflictError, match="was taken over by job-1"):
        former._beat(place)


def test_a_killed_process_of_this_machine_does_not_block(place: str, tmp_path: Path, claim: Make) -> None:
    if "memory://" in place:
        place = f"file://{tmp_path}/by-url"
    code = f"import os; from raytide.core.io.claim import Claim; Claim([{place!r}], 'job-1'); os.kill(os.getpid(), 9)"
    subprocess.run(
        [sys.executable, "-c", code], check=False, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    held = read_claim(place)
    assert held is not None
    assert held.holder == "job-1"
    assert claim(place, holder="job-2", watch_s=1000.0).epoch == 2


def test_a_pid_that_was_used_again_is_no_sign_of_life(place: str, claim: Make) -> None:
    claim(place, holder="job-1", beat_s=1000.0)
    rewrite(place, started="1")
    assert claim(place, holder="job-2", watch_s=1000.0).epoch == 2


@pytest.mark.parametrize("pid", [-1, 0, 1 << 80])
def test_a_pid_that_is_none_leaves_it_to_the_heartbeats(tmp_path: Path, claim: Make, pid: int) -> None:
    claim(str(tmp_path), holder="job-1", beat_s=1000.0)
    rewrite(str(tmp_path), pid=pid)
    assert claim(str(tmp_path), holder="job-2").epoch == 2


def test_a_run_elsewhere_that_beats_is_refused_whatever_its_clock_says(place: str, claim: Make) -> None:
    elsewhere(place, claim)
    stop = threading.Event()

    def beat() -> None:
        count = 0
        while not stop.wait(0.05):
            count += 1
            rewrite(place, beats=count, since_s=0.0)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ConflictError, match="is being written by job-1"):
            claim(place, holder="job-2", watch_s=30.0)
    finally:
        stop.set()
        thread.join()


def test_a_run_elsewhere_that_is_silent_is_taken_over(place: str, claim: Make) -> None:
    elsewhere(place, claim)
    assert claim(place, holder="job-2").epoch == 2


def test_the_heartbeat_of_a_folder_needs_no_room(tmp_path: Path, claim: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    held = claim(str(tmp_path / "run"), holder="job-1")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(claims, "write_json", full)
    file = tmp_path / "run" / claims.NAME
    before = file.stat().st_mtime_ns
    wait_until(lambda: file.stat().st_mtime_ns > before)
    held.check()


def test_of_many_that_begin_together_one_gets_it(place: str, claim: Make) -> None:
    barrier, won, refused = threading.Barrier(6), list[Claim](), list[ConflictError]()

    def take(number: int) -> None:
        barrier.wait()
        try:
            won.append(claim(place, holder=f"job-{number}"))
        except ConflictError as error:
            refused.append(error)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(120)
    assert len(won) + len(refused) == 6
    wait_until(lambda: sum(one._lost is None for one in won) == 1)
    held = read_claim(place)
    assert held is not None
    assert [one.token for one in won if one._lost is None] == [held.token]


def test_what_is_refused_in_one_place_leaves_the_other_free(tmp_path: Path, claim: Make) -> None:
    first, second = str(tmp_path / "out"), str(tmp_path / "checkpoints")
    claim(second, holder="job-1")
    with pytest.raises(ConflictError):
        claim(first, second, holder="job-2")
    assert read_claim(first) is None
    held = read_claim(second)
    assert held is not None
    assert held.holder == "job-1"


def test_one_folder_by_two_names_is_one(tmp_path: Path, claim: Make) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    held = claim(str(tmp_path / "out"), f"file://{tmp_path}/link", holder="job-1")
    assert held.epoch == 1
    with committing([str(tmp_path / "out"), f"file://{tmp_path}/link"], held.token):
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"holder": 1}', "\x00", '{"holder": "x", "pid": "y"}'])
def test_a_file_that_is_no_claim_is_none(tmp_path: Path, claim: Make, text: str) -> None:
    (tmp_path / claims.NAME).write_text(text)
    assert claim(str(tmp_path), holder="job-1").epoch == 1


def test_without_a_token_nothing_is_claimed(tmp_path: Path) -> None:
    with committing([str(tmp_path / "never made")], ""):
        pass
    assert not (tmp_path / "never made").exists()


def wait_until(what: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 120.0
    while not what():
        assert time.monotonic() < deadline_s, "it did not happen within two minutes"
        time.sleep(0.01)


@pytest.mark.parametrize("error", [EndpointConnectionError(endpoint_url="https://s3"), PermissionError("ExpiredToken")])
def test_a_store_that_is_away_is_a_storage_error_and_no_end_of_a_run(
    claim: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    monkeypatch.setattr(claims, "SETTLE_S", 0.0)
    place = f"memory://claims/{tmp_path.name}"
    held = claim(place, beat_s=1000.0)
    with monkeypatch.context() as away:
        away.setattr(type(open_url(place)[0]), "cat_file", Mock(side_effect=error))
        with pytest.raises(StorageError, match=f"cannot reach {place}"), committing([place], held.token):
            pass
        held.release()  # the result of the run counts
    with committing([place], held.token):
        pass
