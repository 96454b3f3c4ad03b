"""A script's own packages: installed once on a node by their content, over raytide's, with a clear end if they cannot
be."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytide.actors.gang.member_processes import MemberProcesses, ProcessExit, ProcessLaunch
from raytide.actors.gang.packages import INSTALL_FAILED, content_key, environment_of, remove_old, with_packages
from raytide.core.errors import ConfigError
from raytide.core.specs.script import ScriptSpec

Ran = Callable[..., tuple[list[str], ProcessExit]]
SHOW = "import tidelib, numpy, sys; print(tidelib.WHERE, sys.prefix != sys.base_prefix, numpy.__name__)"


def write_wheel(folder: Path, version: str) -> None:
    """Writes a package with one module, as a wheel."""
    folder.mkdir(exist_ok=True)
    info = f"tidelib-{version}.dist-info"
    files = {
        "tidelib.py": f"WHERE = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tidelib\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"tidelib-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(name, text)


@pytest.fixture
def ran(tmp_path: Path) -> Iterator[Ran]:
    """Runs a command with packages on a member whose pip knows only the wheels of a folder."""
    for version in ("1.0", "2.0"):
        write_wheel(tmp_path / "wheels", version)
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels"), "TMPDIR": str(tmp_path)}
    members: list[MemberProcesses] = []

    def run(pip_list: list[str], *command: str, ranks: int = 1) -> tuple[list[str], ProcessExit]:
        members.append(MemberProcesses())
        launch = ProcessLaunch(0, with_packages(pip_list, command), pip)
        members[-1].start(None, [replace(launch, rank=rank) for rank in range(ranks)])
        lines: list[str] = []
        exits: list[ProcessExit] = []
        while len(exits) < ranks:
            report = members[-1].report(60.0)
            lines += [line for _, line in report.lines]
            exits += report.exits
        return lines, max(exits, key=lambda each: each.code)

    yield run
    for member in members:
        member.stop(0.0)


def test_packages_are_installed_once_beside_those_of_raytide_whatever_the_working_directory_has(ran: Ran) -> None:
    first, end = ran(["tidelib==1.0"], "python", "-c", SHOW, ranks=2)
    assert (end.code, sorted(first)) == (0, ["1.0 True numpy", "1.0 True numpy", "raytide: installing tidelib==1.0"])
    again, end = ran(["tidelib==1.0"], "python3", "-c", SHOW)
    assert (end.code, again) == (0, ["1.0 True numpy"])
    other, end = ran(["tidelib==2.0"], "sh", "-c", f'exec python -c "{SHOW}"')
    assert (end.code, other[-1]) == (0, "2.0 True numpy")


def test_programs_of_raytides_environment_have_the_packages_too(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as torchrun; pytest is quicker, and imports the module as a plugin."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    lines, end = ran(["tidelib==1.0"], "sh", "-c", "pytest -p tidelib --collect-only")
    assert end.code == pytest.ExitCode.NO_TESTS_COLLECTED, lines


def test_packages_that_cannot_be_installed_end_the_script_with_pips_words(ran: Ran) -> None:
    lines, end = ran(["tidelib==3.0"], "python", "-c", "print('ran')")
    assert end.code == INSTALL_FAILED and "ran" not in lines
    assert "No matching distribution found for tidelib==3.0" in end.tail
    assert "raytide: the packages tidelib==3.0 cannot be installed" in end.tail


def test_an_environment_is_kept_while_it_is_used_and_removed_long_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(path: Path, requirements: object, *, is_quiet: bool) -> None:
        path.mkdir()
        (path / "ready").touch()

    monkeypatch.setattr("raytide.actors.gang.packages._make", make)
    path, handle = environment_of(["a"], tmp_path)
    assert path.name == content_key(["a"]) != content_key(["b"])
    later_s = path.stat().st_mtime + 31 * 86_400
    remove_old(tmp_path, later_s)
    assert path.exists(), "it is in use"
    os.close(handle)
    remove_old(tmp_path, path.stat().st_mtime)
    assert path.exists(), "it was used a moment ago"
    remove_old(tmp_path, later_s)
    assert not path.exists()


def test_an_old_environment_that_another_rank_removes_first_is_no_failure(tmp_path: Path) -> None:
    seen: Any = SimpleNamespace(glob=lambda pattern: [tmp_path / "old" / "ready"])
    remove_old(seen, 0.0)


@pytest.mark.parametrize(
    ("requirement", "why"),
    [
        ("-i https://ana:hush@host/x", "no requirement"),
        ("-r requirements.txt", "no requirement"),
        ("./folder", "no requirement"),
        ("tidelib @ https://ana:hush@host/tidelib.whl", "the URL of tidelib has a login"),
        ("tidelib @ file:///etc/tidelib.whl", "is not https"),
    ],
)
def test_a_requirement_is_a_name_and_no_option_path_or_secret(requirement: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        ScriptSpec.parse({"command": ["python"], "pip": [requirement]}, where="run")
    assert "hush" not in str(refused.value)
    accepted = ScriptSpec.parse(
        {"command": ["x"], "pip": [" peft==0.17 ", "tidelib @ https://host/t.whl"]}, where="run"
    )
    assert accepted.pip == ("peft==0.17", "tidelib @ https://host/t.whl")
