"""Runs the commands of a runbook, as its reader would type them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

RUNBOOKS = Path(__file__).parents[1] / "docs" / "runbooks"
_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(name: str) -> list[str]:
    """Returns the commands of a runbook, without those that set its variables."""
    lines = [line for block in _BLOCK.findall((RUNBOOKS / name).read_text()) for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(("export ", "#"))]


def run(command: str, folder: Path, variables: Mapping[str, str], *, timeout_s: float = 300.0) -> str:
    """Runs a line in a shell in which `raytide` is this checkout's; returns what it prints. Any exit code but 0 is an
    error."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    script = programs / "raytide"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m raytide.cli "$@"\n')
    script.chmod(0o755)
    environment = {**os.environ, **variables, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1] / "platform")
    done = subprocess.run(
        ["bash", "-euc", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout
