import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.core.errors import DataError
from raytide.pipelines.cleaning.report import SIZES, CleaningCounts, CleaningReport

DOCUMENT = st.tuples(
    st.integers(0, 1 << 50),
    st.booleans(),
    st.sampled_from([None, "en", "de"]),
    st.dictionaries(st.text(), st.integers(1)),
)


def counted(documents: list[tuple[int, bool, str | None, dict[str, int]]]) -> CleaningCounts:
    counts = CleaningCounts()
    for chars, is_kept, language, changes in documents:
        counts.add(chars, is_kept=is_kept, language=language, changes=changes)
    return counts


@given(st.lists(DOCUMENT), st.lists(DOCUMENT))
def test_counts_of_parts_add_up_to_those_of_the_whole(first: list, second: list) -> None:  # type: ignore[type-arg]
    parts = [CleaningCounts.from_json(counted(each).to_json()) for each in (first, second)]
    assert CleaningCounts.total(parts).to_json() == counted(first + second).to_json()


def test_lengths_are_counted_by_powers_of_two() -> None:
    report = counted(
        [(0, True, None, {}), (1, True, None, {}), (3, False, "en", {}), (1 << 60, True, None, {})]
    ).report()
    assert [i for i, count in enumerate(report.kept_lengths) if count] == [0, 1, SIZES - 1]
    assert [i for i, count in enumerate(report.dropped_lengths) if count] == [2]
    assert CleaningReport.from_bytes(report.to_bytes(), "x") == report


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"kept_lengths": [1]}', b"[" * 100_000])
def test_a_malformed_report_is_an_error(content: bytes) -> None:
    with pytest.raises(DataError, match="there is malformed"):
        CleaningReport.from_bytes(content, "there")
