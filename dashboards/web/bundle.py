"""The files of the built web page, in memory. Each has its content type, its compressed form and its HTTP headers."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

STATIC = Path(__file__).parent / "static"
"""The folder that `./dev page` writes. The names of scripts and styles carry a hash of their content."""
ENTRY = "index.html"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_POLICY = "; ".join(
    [
        "default-src 'self'",
        "img-src 'self' data:",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    ]
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_FOREVER, _ASK_AGAIN = "public, max-age=31536000, immutable", "no-cache"


@dataclass(frozen=True, slots=True)
class StaticFile:
    media_type: str
    body: bytes
    compressed: bytes
    etag: str
    cache_control: str

    def headers(self) -> dict[str, str]:
        own = {"Cache-Control": self.cache_control, "ETag": self.etag, "Vary": "Accept-Encoding"}
        return {**HEADERS, **own, "Content-Type": self.media_type}


@cache
def bundle(folder: Path = STATIC) -> Mapping[str, StaticFile]:
    """Returns the files of the web page by their path below `folder`. Empty if the page was never built."""
    found = {}
    for file in sorted(folder.rglob("*")):
        if file.suffix in _TYPES:
            name = file.relative_to(folder).as_posix()
            found[name] = _read(file, is_hashed=file.parent == folder and file.suffix in (".js", ".css"))
    return found


def version(folder: Path = STATIC) -> str:
    """Returns a hash of the page's entry, by which an open page can tell that a newer build exists. Empty if the page
    was never built.
    """
    entry = bundle(folder).get(ENTRY)
    return "" if entry is None else entry.etag.strip('"')


def _read(file: Path, *, is_hashed: bool) -> StaticFile:
    body = file.read_bytes()
    return StaticFile(
        media_type=_TYPES[file.suffix],
        body=body,
        compressed=gzip.compress(body, 9, mtime=0),
        etag=f'"{hashlib.sha256(body).hexdigest()[:16]}"',
        cache_control=_FOREVER if is_hashed else _ASK_AGAIN,
    )
