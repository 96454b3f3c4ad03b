"""A checkpoint that could not be written is told of, however soon the next one is."""

from __future__ import annotations

from raytide.actors.trainer.checkpoint.manager import UnsavedNotice


def test_a_failure_is_shown_until_a_later_checkpoint_and_at_least_once() -> None:
    notice = UnsavedNotice()
    assert notice.show() == ""
    notice.fail("full")
    assert [notice.show(), notice.show()] == ["full", "full"]
    notice.end()
    assert notice.show() == ""
    notice.fail("full again")
    notice.end()
    assert [notice.show(), notice.show()] == ["full again", ""]
