from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.core.specs.data import TextFilter
from raytide.pipelines.filter import (
    Examiner,
    FilterVerdict,
    Survey,
    describe,
    digest,
    drop_duplicates,
    survey_from_bytes,
)
from raytide.pipelines.readers.base import Drop

RULES = TextFilter(min_chars=2, max_chars=10, max_line_chars=4)


def judge(document: bytes | None, rules: TextFilter) -> FilterVerdict:
    examined = Examiner(rules).examine(Drop("no_text") if document is None else document)
    return FilterVerdict[examined.reason.upper()]


def survey_of(documents: list[bytes | None]) -> Survey:
    verdicts = bytes(judge(document, TextFilter()) for document in documents)
    return survey_from_bytes(verdicts, b"".join(digest(document) for document in documents))


@pytest.mark.parametrize(
    ("document", "verdict"),
    [
        (None, FilterVerdict.NO_TEXT),
        (b"\xff\xfe", FilterVerdict.NOT_UTF8),
        (b"", FilterVerdict.TOO_SHORT),
        ("ü".encode(), FilterVerdict.TOO_SHORT),
        ("üü".encode(), FilterVerdict.KEPT),
        (b"aaaa\nbbbb\n", FilterVerdict.KEPT),
        (b"aaaa\nbbbb\n\n", FilterVerdict.TOO_LONG),
        (b"aaaaa\nb", FilterVerdict.LONG_LINE),
        (b"\n\n", FilterVerdict.KEPT),
    ],
)
def test_a_document_gets_the_first_rule_that_it_breaks(document: bytes | None, verdict: FilterVerdict) -> None:
    assert judge(document, RULES) == verdict


def test_without_limits_everything_that_is_text_is_kept() -> None:
    assert judge(b"x" * 100_000, TextFilter()) == FilterVerdict.KEPT


@given(st.lists(st.sampled_from([b"a", b"b", b"c", b"", None, b"\xff"])))
def test_of_equal_documents_only_the_first_is_kept_and_all_are_counted(documents: list[bytes | None]) -> None:
    survey = drop_duplicates(survey_of(documents))
    kept = [document for document, keep in zip(documents, survey.keep, strict=True) if keep]
    assert kept == [d for i, d in enumerate(documents) if d in (b"a", b"b", b"c") and d not in documents[:i]]
    assert survey.kept + sum(survey.dropped().values()) == survey.documents == len(documents)
    texts = Counter(d for d in documents if d in (b"a", b"b", b"c"))
    assert survey.dropped().get("duplicate", 0) == sum(count - 1 for count in texts.values())


def test_a_dropped_document_does_not_make_a_later_one_a_duplicate() -> None:
    survey = drop_duplicates(survey_of([b"\xff", b"\xff"]))
    assert survey.dropped() == {"not_utf8": 2}


def test_dropping_duplicates_leaves_its_argument_alone() -> None:
    survey = survey_of([b"a", b"a"])
    drop_duplicates(survey)
    assert np.array_equal(survey.keep, [True, True])


def test_reasons_are_described_the_most_frequent_first() -> None:
    assert describe({"too_short": 1, "duplicate": 3}) == "3 duplicate, 1 too_short"
