"""Limits the requests and tokens of each account per minute. All gateway processes of a machine share the token
buckets.

A bucket is a slot in a memory-mapped file. It stores the account's usage, which decays at the rate of the limit. A slot
whose usage has decayed to zero can be reused for another account.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2s
from pathlib import Path

from raytide.actors.serving.openai_api.errors import ApiError
from raytide.core.objects.api_key import ApiKey

SLOTS = 1 << 14
_PROBES = 32
_SLOT = struct.Struct("<16sdddd")
"""A slot: the account's hash, the time of the last change, the requests and tokens used, and the time at which both are
zero again.
"""
_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class RateState:
    """The rate limits of an account, and the current usage under each limit. A limit that the account does not have is
    None.
    """

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    requests_used: float = 0.0
    tokens_used: float = 0.0

    def headers(self) -> dict[str, str]:
        """Returns the response headers `x-ratelimit-*`, as OpenAI defines them."""
        found = {}
        for what, limit, used in (
            ("requests", self.requests_per_min, self.requests_used),
            ("tokens", self.tokens_per_min, self.tokens_used),
        ):
            if limit is not None:
                found[f"x-ratelimit-limit-{what}"] = str(limit)
                found[f"x-ratelimit-remaining-{what}"] = str(max(0, math.floor(limit - used)))
                found[f"x-ratelimit-reset-{what}"] = duration(used * _MINUTE_S / limit)
        return found


class RateLimits:
    """The token buckets of all accounts, in a file that processes share. Without a path, the buckets belong to this
    process alone.
    """

    def __init__(self, path: Path | None = None, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        if path is None:
            file, name = tempfile.mkstemp(prefix="raytide-limits-")
            os.unlink(name)
        else:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(file, SLOTS * _SLOT.size)
        self._file, self._slots = file, mmap.mmap(file, SLOTS * _SLOT.size)

    def close(self) -> None:
        self._slots.close()
        os.close(self._file)

    def take(self, key: ApiKey, tokens: int) -> tuple[int, RateState]:
        """Counts a request and its tokens against the account's limits. `tokens` is the most tokens that the request
        may use.

        Returns the number of counted tokens and the state of the limits. A request with more tokens than the account's
        limit for one minute is counted with exactly that limit, so that it can still run alone. If a limit is exceeded,
        raises an ApiError (429) that says when to retry.
        """
        if key.requests_per_min is None and key.tokens_per_min is None:
            return 0, RateState()
        counted = 0 if key.tokens_per_min is None else min(tokens, key.tokens_per_min)
        with self._locked(key) as (at, state):
            for what, limit, used, asked in (
                ("requests", key.requests_per_min, state.requests_used, 1),
                ("tokens", key.tokens_per_min, state.tokens_used, counted),
            ):
                if limit is not None and used + asked > limit:
                    raise _limited(what, limit, used, asked, state)
            requests = 0.0 if key.requests_per_min is None else state.requests_used + 1.0
            state = replace(state, requests_used=requests, tokens_used=state.tokens_used + counted)
            self._write(at, key, state)
        return counted, state

    def adjust(self, key: ApiKey, tokens: int) -> None:
        """Counts `tokens` more tokens of a request that was already counted. A negative number gives tokens back."""
        if key.tokens_per_min is None or tokens == 0:
            return
        with self._locked(key) as (at, state):
            self._write(at, key, replace(state, tokens_used=max(0.0, state.tokens_used + tokens)))

    @contextmanager
    def _locked(self, key: ApiKey) -> Iterator[tuple[int, RateState]]:
        """Yields the slot of the account and its present state, and keeps other processes from changing any slot
        meanwhile.
        """
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            now_s = self._monotonic_s()
            at, at_s, requests, tokens = self._find(_name(key), now_s)
            passed = max(0.0, now_s - at_s) / _MINUTE_S
            requests = max(0.0, requests - passed * (key.requests_per_min or 0))
            tokens = max(0.0, tokens - passed * (key.tokens_per_min or 0))
            yield at, RateState(key.requests_per_min, key.tokens_per_min, requests, tokens)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _find(self, name: bytes, now_s: float) -> tuple[int, float, float, float]:
        """Returns the position, the time and the usage of the account's slot.

        Without such a slot, it returns those of a free slot, else of the slot that will be free first.
        """
        first = int.from_bytes(name[:4], "little")
        free: list[tuple[float, int]] = []
        for probe in range(_PROBES):
            at = (first + probe) % SLOTS * _SLOT.size
            owner, at_s, requests, tokens, free_at_s = _SLOT.unpack_from(self._slots, at)
            is_of_another_boot = at_s > now_s
            if owner == name and not is_of_another_boot:
                return at, at_s, requests, tokens
            free.append((0.0 if is_of_another_boot or free_at_s <= now_s else free_at_s, at))
        return min(free)[1], now_s, 0.0, 0.0

    def _write(self, at: int, key: ApiKey, state: RateState) -> None:
        now_s = self._monotonic_s()
        pairs = ((state.requests_used, key.requests_per_min), (state.tokens_used, key.tokens_per_min))
        free_s = now_s + max(used * _MINUTE_S / limit for used, limit in pairs if limit is not None)
        _SLOT.pack_into(self._slots, at, _name(key), now_s, state.requests_used, state.tokens_used, free_s)


def duration(seconds: float) -> str:
    """Returns a duration in the format of OpenAI's headers: `17ms`, `8.64s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1e3)}ms"
    if seconds < 60:
        return f"{seconds:.2f}".rstrip("0").rstrip(".") + "s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"


def _limited(what: str, limit: int, used: float, asked: int, state: RateState) -> ApiError:
    wait_s = (used + asked - limit) * _MINUTE_S / limit
    short = {"requests": "RPM", "tokens": "TPM"}[what]
    headers = {"retry-after": str(math.ceil(wait_s)), "retry-after-ms": str(math.ceil(wait_s * 1e3))}
    return ApiError(
        429,
        f"Rate limit reached on {what} per min ({short}): Limit {limit}, Used {math.ceil(used)}, Requested {asked}. "
        f"Please try again in {duration(wait_s)}.",
        type=what,
        code="rate_limit_exceeded",
        headers={**headers, **state.headers()},
    )


def _name(key: ApiKey) -> bytes:
    return blake2s(key.account.encode(), digest_size=16).digest()
