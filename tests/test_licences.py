"""No dependency has a licence that raytide's users could not live with."""

from __future__ import annotations

from dataclasses import dataclass, field
from email.message import Message
from importlib import metadata
from typing import Any

import pytest
from tests import licences
from tests.licences import Line, allows, licence_of, needed


@dataclass
class Fake:
    version: str = "1.0"
    requires: list[str] | None = None
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def metadata(self) -> Any:
        message = Message()
        for key, value in self.told.items():
            for each in value if isinstance(value, list) else [value]:
                message[key] = each
        return message


def test_every_dependency_s_licence_is_allowed() -> None:
    found = licences.inventory()
    runs = {line.name for line in found if line.is_needed}
    assert {"ray", "torch", "pydantic", "numpy"} <= runs
    assert {"pytest", "ruff", "moto", "raytide"}.isdisjoint(runs)
    assert [(line.name, line.licence) for line in found if line.is_needed and not line.is_allowed] == []


def test_what_the_page_contains_has_a_licence_that_is_allowed() -> None:
    found = {line.name: line for line in licences.vendored()}
    assert found.keys() == {"preact", "uplot"}
    assert all(line.is_allowed and line.is_needed for line in found.values())


def test_what_was_accepted_is_still_needed_and_still_has_that_licence() -> None:
    found = {line.name: line.licence for line in licences.inventory() if line.is_needed}
    assert {name: found.get(name) for name in licences.ACCEPTED} == licences.ACCEPTED


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("Apache-2.0 AND MIT", True),
        ("MIT AND GPL-3.0-only", False),
        ("GPL-2.0-or-later OR MIT", True),
        ("(GPL-2.0-only OR MIT) AND BSD-3-Clause", True),
        ("MIT OR GPL-2.0-only AND BSD-3-Clause", True),
        ("(MIT OR GPL-2.0-only) AND GPL-2.0-only", False),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("GPL-2.0-only WITH Classpath-exception-2.0", False),
        ("UNKNOWN", False),
        ("", False),
        ("(", False),
        ("(MIT", False),
        ("MIT MIT", False),
        ("AND", False),
    ],
)
def test_an_expression_is_allowed_when_it_can_be_met(expression: str, allowed: bool) -> None:
    assert allows(expression) is allowed


@pytest.mark.parametrize(
    ("told", "licence"),
    [
        ({"License-Expression": "MIT OR Apache-2.0", "License": "GPL"}, "MIT OR Apache-2.0"),
        ({"Classifier": ["License :: OSI Approved :: MIT License", "Topic :: X"]}, "MIT"),
        ({"Classifier": ["License :: OSI Approved :: GNU Lesser General Public License v3 (LGPLv3)"]}, "LGPL"),
        ({"Classifier": ["License :: OSI Approved :: GNU General Public License v2 (GPLv2)"]}, "GPL"),
        ({"Classifier": ["License :: OSI Approved"], "License": "Apache 2.0"}, "Apache-2.0"),
        ({"License": "GNU Affero General Public License"}, "AGPL"),
        ({"License": "our own terms"}, "UNKNOWN"),
        ({}, "UNKNOWN"),
    ],
)
def test_a_licence_is_read_however_it_is_written(told: dict[str, Any], licence: str) -> None:
    assert licence_of("some", Fake(told=told)) == licence


def test_needed_are_dependencies_of_dependencies_with_their_extras_and_markers() -> None:
    there = {
        "a": Fake(requires=["b[x]", "gone", 'c; python_version < "3"']),
        "b": Fake(requires=['d; extra == "x"', 'e; extra == "y"', "A"]),
        "c": Fake(),
        "d": Fake(),
        "e": Fake(),
    }

    def find(name: str) -> Fake:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    assert needed(["a"], find) == {"a", "b", "d"}


def test_a_needed_one_under_the_gpl_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, tool = Line("bad", "1", "GPL-3.0-only", True), Line("tool", "1", "GPL-3.0-only", False)
    monkeypatch.setattr(licences, "inventory", lambda: [bad, tool])
    assert licences.main() == 1
    assert "may not have: bad (GPL-3.0-only)." in capsys.readouterr().err
    monkeypatch.setattr(licences, "inventory", lambda: [tool])
    assert licences.main() == 0
