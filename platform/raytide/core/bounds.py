"""The bounds on what a user may send. One table, so that specs, errors and docs/security.md say the same.

Each is far above what a real cluster needs and low enough that one tick stays well below a second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

MOST_SPEC_BYTES = 256 << 10
"""The size of one spec, everything nested in it included."""
MOST_FILE_BYTES = 64 << 20
"""The size of a file of raytide's own: a manifest, what was learned."""
MOST_DEPTH = 32
"""Levels of lists and mappings in one spec."""
MOST_CHARS = 64 << 10
"""The length of any one text in a spec."""
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
"""Ray counts resources in ten-thousandths; the largest amount is a petabyte of memory."""

MOST_REPORTED = 128
"""Names in the progress of one job."""
MOST_REPORTED_CHARS = 4000
"""The length of one reported text; the rest is cut off."""
MOST_REPORTED_BYTES = 16 << 10
"""The size of the progress of one job, as JSON."""

MOST_PAGE_BYTES = 16 << 20
"""Of specs in one answer of the API."""

LIVE_JOBS = 1000
"""Jobs of one team that are not over, unless `metadata.raytide.max_live_jobs` says otherwise."""
TEAM_MEMBERS = 8192
"""Members of all leases of one team, unless `metadata.raytide.limits.team_members` says otherwise."""
LIVE_ENDPOINTS = 200
"""Endpoints of one team that are not deleted."""
TEAM_REPLICAS = 8192
"""Member processes of all replicas that a team's endpoints may have at most."""
LIVE_SHAPES = 4096
"""Shapes of all these jobs together: each is looked at when the queue is gone through."""
LIVE_SPEC_BYTES = 16 << 20
"""Bytes of the specs of all jobs that are not over: every tick reads them."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_BARE_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def _one_line(text: str) -> str:
    if found := _CONTROL.search(text):
        raise ValueError(f"{found[0]!r} is a control character, which a terminal would obey")
    return text


Name = Annotated[str, StringConstraints(min_length=1, max_length=100), AfterValidator(_one_line)]
"""One line of at most 100 characters."""
Word = Annotated[str, StringConstraints(max_length=256), AfterValidator(_one_line)]
"""One line of at most 256 characters, or nothing."""
Location = Annotated[str, StringConstraints(max_length=4096), AfterValidator(_one_line)]
"""A path or URL."""
Labels = Annotated[dict[Name, Word], Field(max_length=MOST_LABELS)]
"""Names with one line of text each."""
Seconds = Annotated[float, Field(ge=0, le=MOST_DELAY_S)]
Dollars = Annotated[float, Field(gt=0, le=MOST_USD)]


def storable(text: str) -> str:
    """The text without what no database or JSON encoder takes: NUL is dropped, half a surrogate pair becomes U+FFFD."""
    return _UNSTORABLE.sub(lambda found: "" if found[0] == "\0" else "\ufffd", text)


def encodable(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which no encoder takes."""
    return _LONE_SURROGATE.sub("\ufffd", text)


def shortened(text: str, most: int = MOST_REPORTED_CHARS) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}\u2026"


def printable(text: str, most: int = MOST_REPORTED_CHARS) -> str:
    """The text as a terminal may show it: storable, without escape sequences, cut to `most` characters."""
    return _BARE_CONTROL.sub("\ufffd", storable(shortened(text, most)))


def problem_of(data: object, most_bytes: int = MOST_SPEC_BYTES) -> str:
    """Returns what makes a spec's raw data unacceptable whatever its schema says; empty when nothing does.

    Checked are its size, its depth, and values that JSON or a database cannot hold.
    """
    left, stack = most_bytes, [(data, 0)]
    while stack:
        value, depth = stack.pop()
        if isinstance(value, Mapping | list | tuple | set | frozenset):
            if depth == MOST_DEPTH:
                return f"it is nested deeper than {MOST_DEPTH} levels"
            left -= 2
            if len(value) > left:  # before its entries are put on the stack
                return _too_large(most_bytes)
            entries = value if not isinstance(value, Mapping) else (*value.keys(), *value.values())
            stack.extend((entry, depth + 1) for entry in entries)
        elif isinstance(value, str):
            left -= len(value) + 2
            if len(value) > MOST_CHARS:
                return f"a text has {len(value):,} characters; {MOST_CHARS:,} are allowed"
            if found := _UNSTORABLE.search(value):
                return f"a text holds {found[0]!r}, which is no character"
        else:
            left -= 8
            if isinstance(value, float) and not math.isfinite(value):
                return f"{value} is no finite number"
            if isinstance(value, int) and value.bit_length() > 64:
                return "a number needs more than 64 bits"
        if left < 0:
            return _too_large(most_bytes)
    return ""


def _too_large(most_bytes: int) -> str:
    return f"it is larger than {most_bytes >> 10} KiB"
