"""What is put in place of Ray's own."""

from __future__ import annotations

import pytest

from raytide.core.ray_internals import hush_node_deaths


def test_drivers_print_nothing_of_raylets_that_end_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray._private import worker

    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    hush_node_deaths()
    printer = worker.listen_error_messages.__globals__["print_to_stdstream"]
    printer({"lines": ["Raylet is terminated"], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    assert capsys.readouterr().out == ""
