"""The demo leaves nothing behind, whatever ends it. That it works is for `./dev demo` to show."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest
from rich.console import Console

from raytide.cli import demo
from raytide.cli.demo import specs
from raytide.cli.demo.view import View
from raytide.core.errors import ClusterError, WaitTimeoutError
from raytide.pipelines.inputs import find_inputs

LIVE = "_live"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_its_text_leaves_out_debian_s_link_into_the_system_s_settings(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = temporary / "lib"
    library.mkdir()
    (library / "os.py").write_text("import abc\n")
    (library / "sitecustomize.py").symlink_to("/etc/passwd")
    monkeypatch.setattr(specs.sysconfig, "get_path", lambda name: str(library))
    assert [Path(file.url).name for file in find_inputs(specs.data(temporary))] == ["os.py"]


def ends_with(monkeypatch: pytest.MonkeyPatch, end: BaseException | str) -> None:
    def live(*args: object, **options: object) -> str:
        if isinstance(end, str):
            return end
        raise end

    monkeypatch.setattr(demo, LIVE, live)


@pytest.mark.parametrize("keep", [False, True])
def test_an_interrupt_leaves_no_folder(temporary: Path, monkeypatch: pytest.MonkeyPatch, keep: bool) -> None:
    ends_with(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        demo.run(keep=keep, out=None, json=False)
    assert list(temporary.iterdir()) == []


def test_a_failure_leaves_no_folder_and_names_the_logs(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends_with(monkeypatch, ClusterError("the head is gone."))
    assert demo.run(keep=False, out=None, json=False) == 1
    assert list(temporary.iterdir()) == []
    shown = capsys.readouterr().out
    assert "did not happen: the head is gone." in shown
    assert "clusters/demo/logs" in shown


def test_what_is_kept_comes_with_how_to_ask_it_and_how_to_end_it(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends_with(monkeypatch, "http://here/v1")
    demo.run(keep=True, out=None, json=False)
    (folder,) = temporary.iterdir()
    shown = capsys.readouterr().out
    assert "curl http://here/v1/completions" in shown
    assert f"down --name demo && rm -r {folder}" in shown


def test_a_folder_that_the_user_chose_is_never_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = tmp_path / "mine"
    ends_with(monkeypatch, "http://here/v1")
    for keep in (False, True):
        demo.run(keep=keep, out=chosen, json=False)
        assert chosen.is_dir()
    assert "rm -r" not in capsys.readouterr().out


def test_a_stage_that_took_too_long_is_told_without_what_was_not_reached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends_with(
        monkeypatch, WaitTimeoutError("job-2 is still running after 600 s.", hint="`raytide why job-2` shows why.")
    )
    assert demo.run(keep=False, out=None, json=False) == 1
    shown = capsys.readouterr().out
    assert "did not happen: job-2 is still running after 600 s." in shown
    assert "raytide why" not in shown and "nan" not in shown


def test_plain_lines_are_said_again_only_when_they_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    with View(["train"], Console(width=80)) as view, view.stage("train") as say:
        for now_s in range(100):
            say("step 0" if now_s < 60 else "step 1")
    assert capsys.readouterr().out.split("\n")[1:-2] == ["  step 0", "  step 0", "  step 1", "  step 1"]
