"""The limits on user input, as one table that specs, error messages and docs/security.md use.

Each limit is far above what a real cluster needs, yet low enough that a tick stays well below a second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, StringConstraints

MOST_SPEC_BYTES = 256 << 10
"""The size of one spec, including everything nested in it."""
MOST_FILE_BYTES = 64 << 20
"""The size of a file that raytide writes itself, such as a manifest."""
MOST_DEPTH = 32
"""The nesting depth of lists and mappings in one spec."""
MOST_CHARS = 64 << 10
"""The length of any text in a spec."""
MOST_LABELS = 64
MOST_SHAPES = 16
MOST_RESOURCES = 16
MOST_MEMBERS = 4096
"""The members of one gang, or the member processes of all replicas of one endpoint."""
MOST_REPLICAS = 1024
MOST_DELAY_S = 36525 * 86400.0
"""The longest timeout or delay: a hundred years."""
MOST_USD = 1e9
LEAST_AMOUNT, MOST_AMOUNT = 1e-4, 1e15
"""Ray counts resources in units of 1/10,000; the largest amount is a petabyte of memory."""

MOST_REPORTED = 128
"""The number of names in the progress of one job."""
MOST_REPORTED_CHARS = 4000
"""The length of one reported text; longer text is truncated."""
MOST_REPORTED_BYTES = 16 << 10
"""The size of the progress of one job, as JSON."""

MOST_PAGE_BYTES = 16 << 20
"""The total size of the specs in one API response."""

LIVE_JOBS = 1000
"""Unfinished jobs of one team; the default of `metadata.raytide.max_live_jobs`."""
TEAM_MEMBERS = 8192
"""Members of all leases of one team; the default of `metadata.raytide.limits.team_members`."""
LIVE_ENDPOINTS = 200
"""Endpoints of one team that are not deleted."""
TEAM_REPLICAS = 8192
"""Member processes of all replicas that a team's endpoints may have at most."""
LIVE_SHAPES = 4096
"""Shapes of all unfinished jobs of a team, because each scheduling cycle considers every shape."""
LIVE_SPEC_BYTES = 16 << 20
"""The total size of the specs of a team's unfinished jobs, because every tick reads them."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_BARE_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def _one_line(text: str) -> str:
    if found := _CONTROL.search(text):
        raise ValueError(f"{found[0]!r} is a control character; use printable text")
    return text


def _requirement(text: str) -> str:
    """Returns the requirement without spaces around it. Raises ValueError for an option of pip, a path, and a URL with
    a password, which every log of the job would show."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        found = Requirement(text.strip())
    except InvalidRequirement:
        shown = re.sub(r"//[^/@\s]*@", "//***@", text)
        raise ValueError(f"{shown!r} is no requirement such as name==1.0") from None
    if found.url is not None:
        url = urlsplit(found.url)
        if "@" in url.netloc:
            raise ValueError(f"the URL of {found.name} has a login, which logs would show: configure pip on the nodes")
        if url.scheme not in ("https", "git+https"):
            raise ValueError(f"the URL of {found.name} is not https")
    return text.strip()


_HOST = r"[A-Za-z0-9]+(?:-+[A-Za-z0-9]+)*"
_PART = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:localhost|{_HOST}(?:\.{_HOST})+|{_HOST}(?=:))(?::[0-9]{{1,5}})?(?:/{_PART})+"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
"""A reference as registries define it, with its registry. Ray passes it to a shell, and podman takes what begins with a
dash for an option: neither can be written in it."""


def _image(text: str) -> str:
    """Returns the reference of a container image. Raises ValueError for one without its registry, which each node would
    choose by its own configuration, and for anything else that is no plain reference."""
    if _IMAGE.fullmatch(text):
        return text
    if _IMAGE.fullmatch(text.partition("://")[2]):
        raise ValueError(f"{text!r} has a transport: leave out {text.partition('://')[0]}://")
    if _IMAGE.fullmatch(f"docker.io/{text}"):
        raise ValueError(f"{text!r} names no registry: write docker.io/{text}, or the registry that has it")
    shown = re.sub(r"[^/@\s]*@(?!sha256:)", "***@", text)
    raise ValueError(f"{shown!r} is no image such as registry.example.com/team/train:1 or ...@sha256:DIGEST")


def check_environment(pip: Sequence[str], image: str | None) -> None:
    """Raises ValueError if a spec names both pip packages and a container image. Ray starts a worker with one or the
    other."""
    if pip and image is not None:
        raise ValueError(
            "image cannot be combined with pip: install the packages in the image, or leave one of them out"
        )


Name = Annotated[str, StringConstraints(min_length=1, max_length=100), AfterValidator(_one_line)]
"""One line of at most 100 characters."""
Word = Annotated[str, StringConstraints(max_length=256), AfterValidator(_one_line)]
"""One line of at most 256 characters; may be empty."""
Location = Annotated[str, StringConstraints(max_length=4096), AfterValidator(_one_line)]
"""A path or URL."""
Labels = Annotated[dict[Name, Word], Field(max_length=MOST_LABELS)]
"""A mapping of names to one line of text each."""
Requirements = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_requirement)], ...],
    Field(max_length=200),
]
"""Requirements for pip, such as `peft==0.17`, which are installed once on each node with the node's own configuration
of pip.
"""
Image = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_image)]
"""Such as `registry.example.com/team/train:1`, best with `@sha256:...`: pulled once to each node, by podman."""
Seconds = Annotated[float, Field(ge=0, le=MOST_DELAY_S)]
Dollars = Annotated[float, Field(gt=0, le=MOST_USD)]


def storable(text: str) -> str:
    """Returns the text in a form that databases and JSON encoders accept. NULs are removed, and lone surrogates become
    U+FFFD."""
    return _UNSTORABLE.sub(lambda found: "" if found[0] == "\0" else "\ufffd", text)


def encodable(text: str) -> str:
    """Returns the text with lone surrogates replaced by U+FFFD."""
    return _LONE_SURROGATE.sub("\ufffd", text)


def shortened(text: str, most: int = MOST_REPORTED_CHARS) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}\u2026"


def reportable(value: float | int | str) -> float | int | str:
    """Returns a value that a job reports, in a form that the API accepts. Texts are shortened, as they would be in the
    store, and lose NULs and invalid UTF-8. NaN and infinity become texts, because JSON has no such numbers.
    """
    if isinstance(value, str):
        return shortened(value.encode(errors="replace").decode().replace("\0", ""))
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def printable(text: str, most: int = MOST_REPORTED_CHARS) -> str:
    """Returns the text in a form safe for a terminal. The result has the form that `storable` returns, contains no
    escape sequences, and has at most `most` characters.
    """
    return _BARE_CONTROL.sub("\ufffd", storable(shortened(text, most)))


def problem_of(data: object, most_bytes: int = MOST_SPEC_BYTES) -> str:
    """Returns the reason why a spec's raw data is not acceptable. Returns an empty text if the data is acceptable.

    The schema is not checked. The checks cover the size, the depth, and values that JSON or a database cannot hold.
    """
    left, stack = most_bytes, [(data, 0)]
    while stack:
        value, depth = stack.pop()
        if isinstance(value, Mapping | list | tuple | set | frozenset):
            if depth == MOST_DEPTH:
                return f"it is nested deeper than {MOST_DEPTH} levels"
            left -= 2
            if len(value) > left:  # before its entries go on the stack
                return _too_large(most_bytes)
            entries = value if not isinstance(value, Mapping) else (*value.keys(), *value.values())
            stack.extend((entry, depth + 1) for entry in entries)
        elif isinstance(value, str):
            left -= len(value) + 2
            if len(value) > MOST_CHARS:
                return f"a text has {len(value):,} characters; {MOST_CHARS:,} are allowed"
            if found := _UNSTORABLE.search(value):
                return f"a text holds {found[0]!r}, which is not a valid character"
        else:
            left -= 8
            if isinstance(value, float) and not math.isfinite(value):
                return f"{value} is not a finite number"
            if isinstance(value, int) and value.bit_length() > 64:
                return "a number needs more than 64 bits"
        if left < 0:
            return _too_large(most_bytes)
    return ""


def _too_large(most_bytes: int) -> str:
    return f"it is larger than {most_bytes >> 10} KiB"
