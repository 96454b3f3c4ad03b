"""Finds the executables of Prometheus and Alertmanager on this machine."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Literal

Program = Literal["prometheus", "promtool", "alertmanager", "amtool"]

HOW_TO_INSTALL = (
    "Debian and Ubuntu: apt-get install prometheus prometheus-alertmanager; elsewhere put prometheus and alertmanager "
    "on the PATH. In a checkout, ./dev setup fetches both."
)
_OTHER_NAMES = {"alertmanager": "prometheus-alertmanager"}  # Debian's


def find_program(name: Program) -> str | None:
    """Returns the path of a program, or None if it is not installed.

    The function searches the PATH, then the folder into which `./dev setup` of a source checkout unpacks programs.
    """
    unpacked = str(Path(sys.prefix) / "tools" / "bin")
    return shutil.which(name) or shutil.which(_OTHER_NAMES.get(name, name)) or shutil.which(name, path=unpacked)
