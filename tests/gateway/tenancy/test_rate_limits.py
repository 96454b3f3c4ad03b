from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.actors.serving.openai_api.errors import ApiError
from raytide.core.objects.api_key import ApiKey
from raytide.gateway.tenancy.rate_limits import RateLimits, RateState, duration


class Times:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def key(account: str = "key-1", rpm: int | None = None, tpm: int | None = None) -> ApiKey:
    return ApiKey("key-9", "web", "blue", "ana", account, requests_per_min=rpm, tokens_per_min=tpm)


def refused(limits: RateLimits, key: ApiKey, tokens: int = 0) -> ApiError:
    with pytest.raises(ApiError) as error:
        limits.take(key, tokens)
    return error.value


def test_requests_beyond_the_rate_are_refused_until_the_bucket_has_filled_again() -> None:
    times = Times()
    limits = RateLimits(monotonic_s=times)
    limited = key(rpm=60)
    for _ in range(60):
        limits.take(limited, 5)
    error = refused(limits, limited)
    assert (error.status, error.body.error.type, error.body.error.code) == (429, "requests", "rate_limit_exceeded")
    assert (error.headers["retry-after"], error.headers["retry-after-ms"]) == ("1", "1000")
    assert error.headers["x-ratelimit-remaining-requests"] == "0"
    times.now_s += 1.0
    _, state = limits.take(limited, 5)
    assert state.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
    }
    times.now_s += 60.0
    assert limits.take(limited, 5)[1].requests_used == 1.0


def test_tokens_are_counted_at_the_most_and_given_back_at_the_end() -> None:
    times = Times()
    limits = RateLimits(monotonic_s=times)
    limited = key(tpm=1000)
    assert limits.take(limited, 600)[0] == 600
    error = refused(limits, limited, 600)
    assert (error.body.error.type, error.headers["retry-after"]) == ("tokens", "12")
    limits.adjust(limited, 100 - 600)
    counted, state = limits.take(limited, 600)
    assert state.headers()["x-ratelimit-remaining-tokens"] == "300"
    limits.adjust(limited, -10_000)  # never below zero
    counted, state = limits.take(limited, 10**9)  # larger than a minute's limit: it may run alone
    assert (counted, state.tokens_used) == (1000, 1000.0)
    limits.adjust(limited, 500)  # it used more than the limit
    assert refused(limits, limited, 1).headers["x-ratelimit-reset-tokens"] == "1m30s"


def test_a_refused_request_counts_for_nothing() -> None:
    limits = RateLimits(monotonic_s=Times())
    limited = key(rpm=2, tpm=100)
    limits.take(limited, 90)
    refused(limits, limited, 50)
    assert limits.take(limited, 10)[1].requests_used == 2.0


def test_keys_of_one_account_share_a_bucket_and_others_do_not() -> None:
    limits = RateLimits(monotonic_s=Times())
    limits.take(key("key-1", rpm=1), 0)
    refused(limits, key("key-1", rpm=1))
    limits.take(key("key-2", rpm=1), 0)
    assert limits.take(key("key-1"), 10**9) == (0, RateState())  # without limits


def test_processes_of_a_machine_share_the_file(tmp_path: Path) -> None:
    path = tmp_path / "limits.bin"
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        granted = pool.starmap_async(take_many, [(str(path), 300)] * 2).get(240)
    assert sum(granted) == 100


def take_many(path: str, times: int) -> int:
    limits, granted = RateLimits(Path(path), monotonic_s=lambda: 1000.0), 0
    for _ in range(times):
        try:
            limits.take(key(rpm=100), 0)
            granted += 1
        except ApiError:
            pass
    return granted


def test_a_bucket_from_before_a_reboot_is_empty(tmp_path: Path) -> None:
    times = Times()
    limits = RateLimits(tmp_path / "limits.bin", times)
    limits.take(key(rpm=1), 0)
    limits.close()
    times.now_s = 5.0
    limits = RateLimits(tmp_path / "limits.bin", times)
    assert limits.take(key(rpm=1), 0)[1].requests_used == 1.0
    refused(limits, key(rpm=1))


def test_slots_that_have_decayed_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytide.gateway.tenancy.rate_limits.SLOTS", 4)
    times = Times()
    limits = RateLimits(monotonic_s=times)
    for number in range(50):
        limits.take(key(f"key-{number}", rpm=60), 0)
        times.now_s += 1.0
    for number in range(4):  # all slots are taken by accounts that are still limited
        limits.take(key(f"old-{number}", rpm=1), 0)
    for number in range(4):
        refused(limits, key(f"old-{number}", rpm=1))


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 300), st.integers(0, 300)), max_size=60))
def test_no_minute_has_more_than_twice_the_limit(steps: list[tuple[float, int, int]]) -> None:
    """A full bucket and what flows into it within the minute; requests end at once with what they used."""
    times = Times()
    limits = RateLimits(monotonic_s=times)
    limited, used = key(tpm=200), list[tuple[float, int]]()
    for wait_s, most, tokens in steps:
        times.now_s += wait_s
        try:
            counted, _ = limits.take(limited, most)
        except ApiError:
            continue
        limits.adjust(limited, min(tokens, counted) - counted)
        used.append((times.now_s, min(tokens, counted)))
    for start_s, _ in used:
        assert sum(tokens for at_s, tokens in used if start_s <= at_s < start_s + 60.0) <= 400
    limits.close()


def test_durations_are_written_as_openai_writes_them() -> None:
    assert [duration(s) for s in (0.0, 0.0171, 1.0, 8.64, 20.0, 59.9, 60.0, 119.5)] == [
        *("0ms", "18ms", "1s", "8.64s", "20s", "59.9s", "1m0s", "2m0s"),
    ]
