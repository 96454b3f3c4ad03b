"""The units of a head on an own machine: their commands are known, and the first start makes Ray's token once."""

from __future__ import annotations

import configparser
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raytide.cli.app import app

UNITS = Path(__file__).resolve().parents[2] / "deploy" / "systemd"


def unit(name: str) -> configparser.ConfigParser:
    found = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read(UNITS / f"{name}.service")
    return found


@pytest.mark.parametrize("name", ["ray-head", "raytide-head", "raytide-standby"])
def test_a_unit_runs_as_a_user_of_its_own_and_starts_again(name: str) -> None:
    service = unit(name)["Service"]
    assert service["User"] == "raytide"
    assert service["Restart"] == "on-failure"  # `raytide down` ends it without an error, and it stays ended
    assert "RAY_AUTH_MODE=token" in service["Environment"].split()


def test_raytide_s_part_follows_ray_s_and_its_command_is_known() -> None:
    found = unit("raytide-head")
    assert found["Unit"]["Requires"] == found["Unit"]["After"] == "ray-head.service"
    program, command, _, *options = shlex.split(found["Service"]["ExecStart"])
    shown = CliRunner().invoke(app, [command, "--help"])
    assert (Path(program).name, shown.exit_code) == ("raytide", 0)
    assert [option for option in options if option not in shown.output] == []


def test_a_head_of_several_starts_ray_itself_and_its_command_is_known() -> None:
    found = unit("raytide-standby")
    assert "Requires" not in found["Unit"]
    _, command, _, *options = shlex.split(found["Service"]["ExecStart"])
    assert (command, options) == ("head", ["--standby", "--block"])
    shown = CliRunner().invoke(app, [command, "--help"])
    assert [option for option in options if option not in shown.output] == []


def test_ray_knows_the_options_of_its_start() -> None:
    from ray.scripts.scripts import start

    _, command, *options = shlex.split(unit("ray-head")["Service"]["ExecStart"])
    known = {name for parameter in start.params for name in parameter.opts}
    assert command == start.name
    assert {option.partition("=")[0] for option in options} - known == set()


def test_ray_s_token_is_made_once_and_for_its_user_alone(tmp_path: Path) -> None:
    command = shlex.split(unit("ray-head")["Service"]["ExecStartPre"])
    token = tmp_path / ".ray" / "auth_token"
    made = []
    for _ in range(2):
        subprocess.run(command, env={**os.environ, "HOME": str(tmp_path)}, check=True, timeout=300)
        made.append(token.read_text())
    assert made[0] == made[1] and len(bytes.fromhex(made[0])) == 32
    assert (token.stat().st_mode & 0o777, token.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_ray_s_sockets_and_logs_are_where_nobody_else_enters_and_both_units_find_them(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir(mode=0o755)
    command = shlex.split(unit("ray-head")["Service"]["ExecStartPre"])
    subprocess.run(command, env={**os.environ, "HOME": str(tmp_path)}, check=True, timeout=300)
    assert (tmp_path / "tmp").stat().st_mode & 0o777 == 0o700
    for name in ("ray-head", "raytide-head"):
        variables = dict(each.split("=", 1) for each in unit(name)["Service"]["Environment"].split())
        assert variables["RAY_TMPDIR"] == f"{variables['HOME']}/tmp"
