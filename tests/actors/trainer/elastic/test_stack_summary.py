"""A thread's place is told without holding on to anything that it has."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from raytide.actors.trainer.elastic.worker_status import stack_summary


class Thing:
    pass


@contextmanager
def stuck(name: str) -> Iterator[tuple[threading.Thread, list[weakref.ref[Thing]]]]:
    """A thread that waits inside of `reads_for_ever`, with a thing in its hands."""
    there, go, seen = threading.Event(), threading.Event(), []

    def reads_for_ever() -> None:
        thing = Thing()
        seen.append(weakref.ref(thing))
        there.set()
        go.wait()

    thread = threading.Thread(target=reads_for_ever, name=name, daemon=True)
    thread.start()
    there.wait()
    while sys._current_frames()[thread.ident or 0].f_code.co_name != "wait":  # it is still between the two
        time.sleep(0.001)
    try:
        yield thread, seen
    finally:
        go.set()
        thread.join()


def test_the_innermost_frames_are_named_and_nothing_of_them_is_kept() -> None:
    """A group that a frame still holds has open sockets, and peers wait for it."""
    gc.collect()
    gc.disable()
    try:
        with stuck("torch-0") as (thread, seen):
            where, waits = stack_summary(thread.ident or 0)
            assert where.index("in wait") < where.index("in reads_for_ever")
            assert not waits
        assert seen[0]() is None
    finally:
        gc.enable()


def test_behind_a_lock_the_threads_that_read_are_shown() -> None:
    with stuck("torch-0") as (waiting, _), stuck("data-0"):
        assert "thread data-0: " in stack_summary(waiting.ident or 0)[0]
    with stuck("torch-0") as (waiting, _), stuck("lease-watch"):
        assert "lease-watch" not in stack_summary(waiting.ident or 0)[0]


def test_a_thread_that_is_gone_is_nowhere() -> None:
    assert stack_summary(0) == ("", False)
