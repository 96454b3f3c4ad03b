import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.text.stop_strings import StopScanner

TEXT = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3)


@given(st.lists(TEXT, max_size=10), STOPS, st.booleans())
def test_the_stop_that_is_complete_first_ends_the_text_however_it_is_cut(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    scanner = StopScanner(stops, include=include)
    emitted = "".join(scanner.push(piece) for piece in pieces)
    whole = "".join(pieces)
    found = [(at + len(stop), at) for stop in stops if (at := whole.find(stop)) >= 0]
    assert scanner.stopped == bool(found)
    if not found:
        assert emitted + scanner.flush() == whole
        return
    end, start = min(found)
    assert emitted == whole[: end if include else start]
    assert scanner.flush() == ""


def test_holds_back_only_what_could_become_a_stop() -> None:
    scanner = StopScanner(["END"])
    assert [scanner.push(piece) for piece in ("a E", "N", "x EN", "D b")] == ["a ", "", "ENx ", ""]
    assert scanner.stopped


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, ""), (1, "."), (2, "..ab"), (4, "..ab.")])
def test_text_before_min_tokens_does_not_stop(min_tokens: int, expected: str) -> None:
    scanner = StopScanner.of(SamplingParams(stop=".", min_tokens=min_tokens))
    assert "".join(scanner.push(piece) for piece in (".", ".", "ab", ".", ".")) == expected


def test_the_stop_string_itself_comes_when_asked_for() -> None:
    scanner = StopScanner.of(SamplingParams(stop=["END"], include_stop_str_in_output=True))
    assert "".join(scanner.push(piece) for piece in ("a E", "N", "D b")) == "a END"
