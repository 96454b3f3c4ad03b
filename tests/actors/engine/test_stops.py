from hypothesis import given
from hypothesis import strategies as st

from raytide.actors.engine.stops import StopScanner

TEXT = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3)


@given(st.lists(TEXT, max_size=10), STOPS)
def test_emits_everything_before_the_first_stop_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    emitted = ""
    for piece in pieces:
        emitted += scanner.push(piece)
        if scanner.stopped:
            break
    whole = "".join(pieces)
    if not scanner.stopped:
        assert not any(stop in whole for stop in stops)
        assert emitted + scanner.flush() == whole
        return
    assert scanner.flush() == ""
    assert whole.startswith(emitted)
    assert not any(stop in emitted for stop in stops)
    assert any(whole[len(emitted) :].startswith(stop) for stop in stops)


def test_holds_back_only_what_could_become_a_stop() -> None:
    scanner = StopScanner(["END"])
    assert [scanner.push(piece) for piece in ("a E", "N", "x EN", "D b")] == ["a ", "", "ENx ", ""]
    assert scanner.stopped
