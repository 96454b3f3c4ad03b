"""Logs in parts: together they are what the attempts wrote, wherever they are cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.control.api.services.logs import job_log as logs
from raytide.control.supervision.log_rotation import HEADER_BYTES
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.queue.lifecycle.jobs import DriverKey

SETTING_UP = "2026-11-22 00:50:07,258\tINFO job_manager.py:581 -- Runtime env is setting up.\n"
PREFACE = f"{SETTING_UP}Running entrypoint for job raytide-job-3-0: exec python -m raytide.control.drivers.job_driver\n"

TEXTS = st.lists(st.text(st.sampled_from("a\n\u00fc\u20ac\U0001f600")), min_size=1, max_size=3)


class Files:
    """The logs of each attempt."""

    def __init__(self, *texts: str) -> None:
        self.files = [text.encode() for text in texts]
        self.most = 0

    def log(self, key: DriverKey, start: int, most: int) -> tuple[bytes, int]:
        self.most = max(self.most, most)
        found = self.files[key.attempt] if key.attempt < len(self.files) else b""
        return found[start : start + most], len(found)


def job(attempts: int = 1, state: JobState = JobState.SUCCEEDED) -> Job:
    spec = JobSpec(kind=JobKind.SCRIPT, name="s", gang=GangSpec(shapes=(Shape(resources={"CPU": 1.0}),)))
    return replace(Job("job-3", spec, "ana", state, 0.0), restarts=attempts - 1)


def read(files: Files, of: Job, after: str = "") -> tuple[str, str]:
    text, has_more = "", True
    while has_more:
        found = logs.part(files, of, after)
        assert found.after != after or not found.has_more, "it comes no further"
        text, after, has_more = text + found.text, found.after, found.has_more
    return text, after


@given(TEXTS, st.integers(4, 12), st.booleans())
def test_the_parts_of_a_log_are_all_of_it(texts: list[str], size: int, has_preface: bool) -> None:
    before = PREFACE if has_preface else ""
    files = Files(*(before + text for text in texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "PART_BYTES", size + len(before))
        text, after = read(files, job(len(texts)))
        assert text == "".join(texts)
        assert read(files, job(len(texts)), after)[0] == ""
    assert files.most <= max(size + len(before), HEADER_BYTES)


@given(TEXTS, st.integers(0, 9), st.integers(1, 9), st.booleans())
def test_the_last_lines_of_a_log(texts: list[str], lines: int, block: int, has_preface: bool) -> None:
    before = PREFACE if has_preface else ""
    files = Files(*(before + text for text in texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "_BLOCK_BYTES", block + len(before))
        text, _ = read(files, job(len(texts)), logs.tail(files, job(len(texts)), lines))
    assert files.most <= max(block + len(before), logs.PART_BYTES)
    every = [line for written in texts for line in written.splitlines(keepends=True)]
    assert text == "".join(every[len(every) - lines :] if lines < len(every) else every)


def test_a_log_that_grows_is_followed_and_half_a_character_waits_for_its_other_half() -> None:
    files, runs = Files(""), job(state=JobState.RUNNING)
    whole, after, text = (PREFACE + "1 \u20ac\n").encode(), "", ""
    for end in range(len(whole) + 1):
        if end in (0, len(SETTING_UP)) or end >= len(PREFACE):  # Ray writes a line at once
            files.files[0] = whole[:end]
            more, after = read(files, runs, after)
            text += more
    assert text == "1 \u20ac\n"


def test_an_attempt_that_wrote_nothing_is_passed() -> None:
    files = Files(f"{PREFACE}one\n", SETTING_UP, "", f"{PREFACE}four\n")
    assert read(files, job(4))[0] == "one\nfour\n"
    assert read(files, job(2), "0:999")[0] == ""


def test_what_is_no_character_is_marked_and_ends_no_log() -> None:
    files = Files("")
    files.files[0] = b"a\xe2\x82"
    assert read(files, job())[0] == "a\ufffd"
    files.files = [b"a\xe2\x82", b"b\xff\n"]
    assert read(files, job(2))[0] == "a\ufffdb\ufffd\n"


def test_last_lines_are_looked_for_only_so_far_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log without line ends, or a huge number of lines, would be read whole while somebody waits for the answer."""
    monkeypatch.setattr(logs, "_BLOCK_BYTES", 8)
    monkeypatch.setattr(logs, "TAIL_BYTES", 24)
    assert logs.tail(Files("x" * 100), job(), 3) == "0:76"
    files = Files("old\n" * 9, "new\n" * 4)
    assert [logs.tail(files, job(2), lines) for lines in (4, 5, 6, 7, 99)] == ["1:0", "0:32", "0:28", "0:28", "0:28"]


def test_a_request_reads_the_logs_of_some_attempts_only() -> None:
    """A job may be restarted 10,000 times, and Ray is asked several times for each attempt."""

    class Counted(Files):
        calls = 0

        def log(self, key: DriverKey, start: int, most: int) -> tuple[bytes, int]:
            self.calls += 1
            return super().log(key, start, most)

    files, of = Counted(f"{PREFACE}one\n", *[""] * 9_998, f"{PREFACE}last\n"), job(10_000)
    found = logs.part(files, of, "0:900")
    assert (found.text, found.after, found.has_more) == ("", f"{logs.MOST_ATTEMPTS}:0", True)
    assert files.calls <= 3 * logs.MOST_ATTEMPTS
    assert read(files, of)[0] == "one\nlast\n"
    files.calls = 0
    assert read(files, of, logs.tail(files, of, 2))[0] == "last\n"
    assert files.calls <= 6 * logs.MOST_ATTEMPTS


def test_of_a_log_from_now_on_what_ray_writes_first_is_left_out_too() -> None:
    files, runs = Files(SETTING_UP), job(state=JobState.RUNNING)
    after = logs.tail(files, runs, 0)
    files.files[0] = f"{PREFACE}hello\n".encode()
    assert read(files, runs, after)[0] == "hello\n"
    assert read(files, runs, logs.tail(files, runs, 0))[0] == ""
