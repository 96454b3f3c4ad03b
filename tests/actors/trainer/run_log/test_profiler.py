"""A profile on request reaches all ranks at the same step and changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.actors.trainer.trainer_ranks import watched

from raytide.actors.trainer.model import apply
from raytide.actors.trainer.run_log import profiler as profile
from raytide.actors.trainer.run_log.folder import RunFolder
from raytide.actors.trainer.runners.local import train_local
from raytide.core.errors import ConfigError, UsageError
from raytide.core.specs.train import GuardSpec, ProfileSpec, TrainSpec


def traces(out: str) -> set[str]:
    return {str(file.relative_to(Path(out) / "profile")) for file in (Path(out) / "profile").rglob("*.*")}


def test_ranks_profile_on_request_and_skip_the_batch_that_only_one_of_them_cannot_compute(
    spec: TrainSpec, run_ranks: Callable[..., list[Any]]
) -> None:
    """2 ranks; rank 1's loss is no number in step 2, and after step 3 somebody asks for a profile of two steps."""
    spec = spec.model_copy(update={"steps": 6, "guard": GuardSpec(nan="skip")})
    mine, theirs = run_ranks(2, watched, spec)
    assert [result.verdict for result in mine] == ["applied", "skipped", *["applied"] * 4]
    assert [result.verdict for result in theirs] == [result.verdict for result in mine]
    assert [result.loss for result in mine[2:]] == [result.loss for result in theirs[2:]]
    assert traces(spec.out) == {f"steps-4-5/rank-{rank}.{end}" for rank in (0, 1) for end in ("json", "txt")}
    assert not (Path(spec.out) / profile.REQUEST).exists()
    for result in mine:
        phases = {name: seconds for name, seconds in result.times.items() if name != "checkpoint"}
        assert {"data", "wait", "forward_backward", "norm"} <= phases.keys()
        assert sum(phases.values()) <= result.step_s
        assert result.memory_bytes > 0 and result.mfu is None


def test_the_steps_that_the_spec_names_leave_a_trace_and_a_table(spec: TrainSpec) -> None:
    spec = spec.model_copy(update={"steps": 3, "profile": ProfileSpec.parse({"from": 2, "to": 9}, where="profile")})
    train_local(spec)
    assert traces(spec.out) == {"steps-2-3/rank-0.json", "steps-2-3/rank-0.txt"}  # the run ended inside the range
    folder = Path(spec.out) / "profile" / "steps-2-3"
    names = {event.get("name") for event in json.loads((folder / "rank-0.json").read_text())["traceEvents"]}
    assert "aten::mm" in names or "aten::linear" in names
    assert "Self CPU" in (folder / "rank-0.txt").read_text()


def test_a_snapshot_of_memory_and_ranges_are_for_gpus(spec: TrainSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own recorder is replaced: there is no GPU to record."""
    calls: list[str] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda *a, **options: calls.append(f"record {options}"))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: (calls.append(path), Path(path).write_text("x")))
    asked = {what: ProfileSpec.parse({"from": 1, "to": 1, "what": what}, where="p") for what in ("memory", "nvtx")}
    for each in asked.values():
        with pytest.raises(ConfigError, match="needs a GPU"):
            apply.check_supported(spec.model_copy(update={"profile": each}), torch.device("cpu"))
    profiler = profile.Profiler(asked["memory"], RunFolder(spec.out), 0, torch.device("cuda"))
    profiler.begin(1, 0)
    profiler.end(1)
    stem = f"{spec.out}/profile/steps-1-1/rank-0"
    assert calls == ["record {'max_entries': 1000000}", f"{stem}.pickle", "record {'enabled': None}"]
    assert traces(spec.out) == {"steps-1-1/rank-0.pickle"}


def test_a_range_that_ends_before_it_begins_and_a_request_for_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"to \(2\) must not be before from \(3\)"):
        ProfileSpec.parse({"from": 3, "to": 2}, where="profile")
    with pytest.raises(UsageError, match="cannot profile 0 steps"):
        profile.request(tmp_path, 0)
    with pytest.raises(UsageError, match="there is no run in"):
        profile.request(tmp_path / "typo", 1)


def test_a_request_that_cannot_be_read_is_put_aside(tmp_path: Path) -> None:
    profiler = profile.Profiler(None, RunFolder(str(tmp_path)), 0, torch.device("cpu"))
    assert profiler.requested_steps() == 0
    (tmp_path / profile.REQUEST).write_text("soon")
    assert profiler.requested_steps() == 0
    assert (tmp_path / f"{profile.REQUEST}.bad").exists()
    profile.request(tmp_path, 2)
    assert profiler.requested_steps() == 2


@pytest.mark.parametrize("body", ['{"steps": 2}', "soon", '{"steps": 1e999}'])
def test_a_request_that_cannot_be_removed_ends_no_run_and_is_taken_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    def denied(file: Path, *arguments: object, **options: object) -> None:
        raise PermissionError(f"{file} may not be moved")

    profiler = profile.Profiler(None, RunFolder(str(tmp_path)), 0, torch.device("cpu"))
    (tmp_path / profile.REQUEST).write_text(body)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", denied)
        patch.setattr(Path, "rename", denied)
        profiler.begin(1, profiler.requested_steps())
        profiler.end(2)
        assert profiler.requested_steps() == 0
    assert (tmp_path / profile.REQUEST).exists()
    profile.request(tmp_path, 2)
    assert profiler.requested_steps() == 2, "a later request is another one"


def test_a_request_that_cannot_be_opened_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / profile.REQUEST).mkdir()
    assert profile.Profiler(None, RunFolder(str(tmp_path)), 0, torch.device("cpu")).requested_steps() == 0
