"""The curves of a run that grows: bounded, each byte read once, repeated steps as they went last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.actors.trainer.run_log import curve, history
from raytide.actors.trainer.run_log.curve import CurveReader, CurveReaders


def line(step: int, **values: object) -> str:
    return (
        json.dumps({"step": step, "loss": 1.0 / step, "times": {"forward": 0.1}, "at_s": float(step), **values}) + "\n"
    )


def test_a_run_that_grows_is_read_on(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    reader = CurveReader(str(tmp_path))
    assert reader.read().steps == ()
    file.write_text(line(1) + line(2)[:9])
    assert reader.read().steps == (1,)
    file.write_text(line(1) + line(2) + line(3, verdict="skipped"))
    (tmp_path / "events.jsonl").write_text('{"at_s": 2.0, "event": "restart"}\n')
    curves = reader.read()
    assert curves.steps == (1, 2, 3)
    assert curves.at_s == (1.0, 2.0, 3.0)
    assert curves.values["times/forward"] == (0.1, 0.1, 0.1)
    assert [event["event"] for event in curves.events] == ["restart"]


@given(jumps=st.lists(st.integers(1, 12), min_size=1, max_size=60))
def test_repeated_steps_count_as_they_went_last(jumps: list[int], tmp_path_factory: object) -> None:
    folder = tmp_path_factory.mktemp("run")  # type: ignore[attr-defined]
    reader, step = CurveReader(str(folder)), 0
    with open(folder / "metrics.jsonl", "w") as file:
        for number, jump in enumerate(jumps):
            step = step + 1 if jump > 2 else max(1, step - jump)
            file.write(line(step, loss=number))
            file.flush()
            if jump % 3 == 0:
                reader.read()
    found, kept = reader.read(), history.read(str(folder)).steps
    known = {each["step"]: each["loss"] for each in kept if each["step"] <= step}
    assert dict(zip(found.steps, found.values["loss"], strict=True)) == known


@given(steps=st.integers(1, 500), points=st.integers(2, 60))
def test_points_are_bounded_and_both_ends_are_shown(steps: int, points: int, tmp_path_factory: object) -> None:
    folder = tmp_path_factory.mktemp("run")  # type: ignore[attr-defined]
    (folder / "metrics.jsonl").write_text("".join(line(step) for step in range(1, steps + 1)))
    curves = CurveReader(str(folder), most_points=40).read(points)
    assert len(curves.steps) <= min(points, 41) + 2
    assert curves.steps[0] == 1 and curves.steps[-1] == steps
    assert list(curves.steps) == sorted(set(curves.steps))


def test_a_run_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    file, reader = tmp_path / "metrics.jsonl", CurveReader(str(tmp_path))
    file.write_text(line(1) + line(2) + line(3))
    assert len(reader.read().steps) == 3
    file.write_text(line(1, loss=7.0))
    assert reader.read().values["loss"] == (7.0,)


def test_what_is_no_step_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        "secret\n[1]\n{}\n" + '{"step": 1, "loss": NaN, "times": 3}\n' + line(2, lr=float("nan"))
    )
    curves = CurveReader(str(tmp_path)).read()
    assert curves.steps == (2,)
    assert curves.values["lr"] == (None,)


@pytest.mark.parametrize("number", ["1e999", "1" + "0" * 400])
def test_a_number_that_no_float_can_hold_is_left_out(tmp_path: Path, number: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(line(1, loss=2.0) + line(2, loss=0.5).replace("0.5", number))
    assert CurveReader(str(tmp_path)).read().values["loss"] == (2.0, None)


def test_few_readers_are_kept(tmp_path: Path) -> None:
    readers = CurveReaders(most=2)
    for name in ("a", "b", "c", "a"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "metrics.jsonl").write_text(line(1))
        assert readers.read(str(tmp_path / name), 10).steps == (1,)
    assert len(readers._readers) == 2


def test_the_names_of_a_run_are_bounded(tmp_path: Path) -> None:
    odd = [line(step, **{f"{step}.{n}": n for n in range(100)}) for step in range(1, 11)]
    (tmp_path / "metrics.jsonl").write_text("".join(odd) + line(11, **{"n" * 201: 1.0}))
    curves = CurveReader(str(tmp_path)).read()
    assert len(curves.values) == curve.MOST_NAMES
    assert len(curves.values["loss"]) == 11 and None not in curves.values["loss"]


def test_the_events_of_a_run_are_bounded_in_bytes(tmp_path: Path) -> None:
    reader = CurveReader(str(tmp_path))
    with (tmp_path / "events.jsonl").open("w") as file:
        for number in range(6):
            file.write(json.dumps({"at_s": number, "event": "e", "why": [0] * (curve.MOST_EVENT_BYTES // 10)}) + "\n")
    assert [event["at_s"] for event in reader.read().events] == [3, 4, 5], "the newest ones"
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"at_s": 6, "event": "e", "why": "x" * curve.MOST_EVENT_BYTES}) + "\n")
        file.write(json.dumps({"at_s": 7, "event": "e"}) + "\n")
    assert [event["at_s"] for event in reader.read().events] == [7]


def test_the_lines_of_a_long_run_are_not_in_memory_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, most = [0], [0]
    parse, add = curve._parsed, CurveReader._add

    def parsed(text: bytes) -> dict[str, object] | None:
        ahead[0] += 1
        most[0] = max(most[0], ahead[0])
        return parse(text)

    def added(self: CurveReader, each: dict[str, object]) -> None:
        ahead[0] -= 1
        add(self, each)

    monkeypatch.setattr(curve, "_parsed", parsed)
    monkeypatch.setattr(CurveReader, "_add", added)
    (tmp_path / "metrics.jsonl").write_text("".join(line(step) for step in range(1, 1001)))
    assert CurveReader(str(tmp_path)).read().steps[-1] == 1000
    assert most == [1]
