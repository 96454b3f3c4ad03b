"""A run's log outlives its drivers, however they end."""

from __future__ import annotations

import json
import math
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from raytide.actors.trainer.elastic.driver import _Driver
from raytide.actors.trainer.elastic.generation import GenerationResult, GenerationRunner
from raytide.actors.trainer.elastic.recovery import ScalingEfficiency, StepRate
from raytide.actors.trainer.elastic.stragglers import RankTimes
from raytide.actors.trainer.run_log import history
from raytide.actors.trainer.run_log.writer import RunLog
from raytide.actors.trainer.types import MicroBatchLimit, StepResult, WorkerStatus, scalar_metrics
from raytide.core.clock import VirtualClock
from raytide.core.errors import StorageError, TrainError
from raytide.core.io.storage import read_bytes
from raytide.core.specs.train import TrainSpec


def record_of(spec: TrainSpec) -> RunLog:
    return RunLog(spec, VirtualClock(1000.0))


@pytest.fixture
def small(tmp_path: Path) -> TrainSpec:
    return TrainSpec(name="small", dataset="none", out=str(tmp_path / "run"), steps=3, stall_timeout_s=60.0)


def done(step: int, loss: float) -> StepResult:
    known: dict[str, Any] = dict.fromkeys(StepResult.__dataclass_fields__, 1)
    texts = {"verdict": "applied", "unsaved": "", "early_end": ""}
    return StepResult(**{**known, **texts, "step": step, "loss": loss, "times": {}})


def test_a_driver_that_starts_again_knows_how_far_the_run_is(small: TrainSpec) -> None:
    first = record_of(small)
    for step, loss in ((1, 3.0), (2, 2.0)):
        first.step(done(step, loss))
    again = record_of(small).result()
    assert (again.steps, again.first_loss, again.loss) == (2, 3.0, 2.0)


def test_the_time_of_steps_that_are_done_again_is_lost_once(small: TrainSpec) -> None:
    record = record_of(small)
    for step in (1, 2, 3, 4, 3, 4, 5, 4):
        record.step(replace(done(step, 1.0), step_s=float(step)))
    assert record.lost_s == (3 + 4) + (4 + 5)


def test_half_a_line_of_a_killed_driver_is_dropped_and_not_written_behind(small: TrainSpec) -> None:
    record_of(small).step(done(1, 3.0))
    metrics = Path(small.out) / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole + whole[:10])
    again = record_of(small)
    assert again.steps == 1
    again.step(done(2, 2.0))
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_no_link_in_out_is_shortened_or_written_through(small: TrainSpec, name: str) -> None:
    """A team's `out` is its own: it may link to a file that only raytide's user can write."""
    out = Path(small.out)
    out.mkdir(parents=True)
    (out.parent / "precious").write_text("the last line has no end")
    (out / name).symlink_to(out.parent / "precious")
    with suppress(OSError):
        record_of(small).step(done(1, 3.0))
    assert (out.parent / "precious").read_text() == "the last line has no end"


def test_a_run_that_was_over_when_its_driver_started_again_shows_all_its_steps(
    small: TrainSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = object.__new__(_Driver)
    driver.spec, driver.record, driver.generation, driver.recovery, driver.workers = (
        small,
        record_of(small),
        0,
        None,
        [],
    )
    driver.worker_group = SimpleNamespace(ready=0, settled_version="", has_refused=False, images="")  # type: ignore[assignment]
    driver.watch = None  # type: ignore[assignment]
    driver.micro_batch = MicroBatchLimit("run")
    driver.step_rate, driver.claim = StepRate(), SimpleNamespace(token="")  # type: ignore[assignment]
    monkeypatch.setattr(driver, "_wait_for_workers", lambda: [SimpleNamespace(host="only")])
    monkeypatch.setattr(driver, "_report_membership", lambda: None)
    monkeypatch.setattr(GenerationRunner, "run", lambda generation: GenerationResult("done"))
    driver.run()
    progress = driver._progress(0)
    assert (progress["step"], progress["steps"]) == (3, 3)
    assert "left_s" not in progress, "no step was seen, so nobody knows how long one takes"


def test_a_driver_says_how_much_work_is_left_and_how_much_may_be_done_again(small: TrainSpec) -> None:
    record_of(small).step(done(1, 3.0))
    driver = object.__new__(_Driver)
    driver.worker_group = SimpleNamespace(settled_version="", has_refused=False, images="")  # type: ignore[assignment]
    driver.spec, driver.record = small.model_copy(update={"steps": 11, "checkpoint_every": 5}), record_of(small)
    driver.step_rate = StepRate(driver.record.step_s)
    progress = driver._progress(1)
    assert (progress["left_s"], progress["redo_s"]) == (10 * done(1, 3.0).step_s, 5 * done(1, 3.0).step_s)


def test_the_pace_counts_what_lies_between_steps_but_not_the_time_without_a_gang() -> None:
    pace = StepRate()
    pace.record_steps(1, 100.0, worked_s=2.0)
    assert pace.step_s == 2.0
    for at_s in range(1, 400):
        pace.record_steps(1, 100.0 + 3.0 * at_s, worked_s=2.0)
    assert pace.step_s == pytest.approx(3.0)
    pace.pause()
    pace.record_steps(4, 9000.0, worked_s=12.0)
    assert pace.step_s == pytest.approx(3.0)


def test_a_rank_that_answers_and_gets_nowhere_ends_the_run_with_its_name(small: TrainSpec) -> None:
    workers: list[Any] = [SimpleNamespace(host=f"member {n}") for n in range(2)]
    killed: list[Any] = []
    worker_group: Any = SimpleNamespace(kill=killed.append)
    rest: Any = {"micro_batch": 1, "on_steps": None}
    generation = GenerationRunner(1, small, workers, worker_group, None, record_of(small), **rest)  # type: ignore[arg-type]
    generation._running = {Future(): 0, Future(): 1}
    generation._heartbeats.last(1).status = WorkerStatus(1, "loading", 60.0, stack="manifest.py:88 in verify")
    generation._find_stalled()
    assert killed == []
    generation._heartbeats.last(1).status = WorkerStatus(1, "loading", 60.1, stack="manifest.py:88 in verify")
    generation._find_stalled()
    ending = generation._result()
    assert killed == [workers[1]]
    assert isinstance(ending.error, TrainError)
    assert "rank 1 on member 1 makes no progress: loading for 60.1 s, in manifest.py:88" in str(ending.error)


def refused(step: int, verdict: str) -> StepResult:
    return replace(done(step, math.nan), verdict=verdict, why="loss nan", samples=(7, 3), times={})  # type: ignore[arg-type]


def test_a_batch_that_was_not_learned_from_is_an_event_with_its_samples_and_no_loss_of_the_run(
    small: TrainSpec,
) -> None:
    record = record_of(small)
    record.step(done(1, 3.0))
    record.step(refused(2, "skipped"))
    record.step(refused(3, "stopped"))
    out = Path(small.out)
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    told = [(event["event"], event["step"], event["verdict"], event["samples"], event["loss"]) for event in events]
    assert told == [("not_applied", 2, "skipped", [7, 3], None), ("not_applied", 3, "stopped", [7, 3], None)]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"], line.get("verdict")) for line in lines] == [
        (1, 3.0, None),
        (2, None, "skipped"),
    ]
    for result in (record.result(), record_of(small).result()):
        assert (result.steps, result.first_loss, result.loss) == (2, 3.0, 3.0)


def test_a_line_tells_tokens_per_second_and_the_phases(small: TrainSpec) -> None:
    record = record_of(small)
    record.step(replace(done(1, 3.0), tokens=100, step_s=0.5, mfu=None, times={"data": 0.1}))
    (line,) = history.read(small.out).steps
    assert (line["tokens_per_s"], line["mfu"], line["times"]) == (200.0, None, {"data": 0.1})
    assert scalar_metrics(line)["times/data"] == 0.1
    assert "mfu" not in scalar_metrics(line)


def test_how_a_run_ended_can_be_read_back(small: TrainSpec) -> None:
    record = record_of(small)
    record.step(done(1, 3.0))
    ended = record.close("done")
    assert history.result(small.out) == ended


def test_a_checkpoint_that_could_not_be_written_is_told_once_and_until_one_could_be(small: TrainSpec) -> None:
    record = record_of(small)
    driver = object.__new__(_Driver)
    driver.worker_group = SimpleNamespace(settled_version="", has_refused=False, images="")  # type: ignore[assignment]
    driver.spec, driver.record, driver.step_rate = small, record, StepRate()
    assert "not_saved" not in driver._progress(1)
    for step in (1, 2):
        record.step(replace(done(step, 3.0), unsaved="no space left while writing x."))
    assert driver._progress(1)["not_saved"] == "no space left while writing x."
    record.step(done(3, 3.0))
    assert driver._progress(1)["not_saved"] == ""
    events = [json.loads(line) for line in (Path(small.out) / "events.jsonl").read_text().splitlines()]
    assert [(event["event"], event["step"]) for event in events] == [("not_saved", 1)]


def test_a_driver_names_the_slowest_rank_by_what_each_rank_reports(small: TrainSpec) -> None:
    workers: list[Any] = [SimpleNamespace(host=f"member {n}") for n in range(2)]
    rest: Any = {"micro_batch": 1, "on_steps": lambda steps, status: None}
    generation = GenerationRunner(1, small, workers, None, None, record_of(small), **rest)  # type: ignore[arg-type]
    for step in range(1, 9):
        for rank, own_s in enumerate((0.5, 2.0)):
            result = replace(done(step, 3.0), times={"wait": 2.0 - own_s}, forward_s=own_s)
            generation._record_status(rank, WorkerStatus(1, "training", 0.0, steps=[result]))
    driver = object.__new__(_Driver)
    driver.record, driver.scaling, driver.saved_at_s = record_of(small), ScalingEfficiency(), None
    driver.rank_times, driver.spec = RankTimes(), small
    values = driver._step_values([done(8, 3.0)], 1.0)
    assert (values["slowest_rank"], values["slowest_ratio"]) == (0, 1.0), "of a new generation nothing is known"
    driver.rank_times = generation.rank_times
    values = driver._step_values([done(8, 3.0)], 1.0)
    assert (values["slowest_rank"], values["slowest_ratio"]) == (1, 4.0)


def test_a_store_that_cannot_be_listed_hides_no_error_of_the_run_and_ends_no_finished_one(
    small: TrainSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(folder: str) -> dict[str, int]:
        raise ConnectionError("unreachable")

    spec = small.model_copy(update={"out": f"memory://{Path(small.out).parent.name}/not-listed"})
    record = record_of(spec)
    monkeypatch.setattr(record.folder.store, "sizes", unreachable)

    def fail() -> None:
        raise StorageError("the bucket is gone.", hint="Look for it.")

    with pytest.raises(StorageError, match="the bucket is gone"):
        record.log_run(fail)
    assert json.loads(read_bytes(f"{spec.out}/run.json"))["reason"].startswith("the bucket is gone")
    again = record_of(spec)
    monkeypatch.setattr(again.folder.store, "sizes", unreachable)
    assert again.log_run(lambda: None).model_dir is None
    assert json.loads(read_bytes(f"{spec.out}/run.json"))["state"] == "done"


def test_a_driver_tells_the_memory_of_the_fullest_gpu_with_the_microbatch_of_the_spec(small: TrainSpec) -> None:
    driver = object.__new__(_Driver)
    driver.record, driver.scaling, driver.saved_at_s = record_of(small), ScalingEfficiency(), None
    driver.rank_times, driver.spec = RankTimes(), small.model_copy(update={"micro_batch": 4})
    step = replace(done(8, 3.0), micro_batch=4, memory_bytes=99)
    driver.rank_times.record(0, [replace(step, gpu_bytes=0)])
    assert "peak_bytes" not in driver._step_values([step], 1.0), "the memory of a process on CPUs is another one"
    for rank, gpu_bytes in enumerate((70, 80, 60)):
        driver.rank_times.record(rank, [replace(step, gpu_bytes=gpu_bytes)])
    assert driver._step_values([step], 1.0)["peak_bytes"] == 80
    assert driver._step_values([replace(step, micro_batch=2)], 1.0)["peak_bytes"] == 0
    assert "gpu_bytes" not in step.metrics_line()


def test_a_run_that_has_ended_still_tells_its_ranks(small: TrainSpec) -> None:
    driver, told = object.__new__(_Driver), list[Any]()
    driver.record, driver.spec, driver.step_rate = record_of(small), small, StepRate()
    driver.workers = [MagicMock() for _ in range(4)]
    driver.watch = driver.worker_group = MagicMock(images="", has_refused=False)
    driver.reporter = MagicMock(close=told.append)
    driver.close()
    assert [progress["world"] for progress in told] == [4]
