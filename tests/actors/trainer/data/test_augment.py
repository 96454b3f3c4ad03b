"""Augmentation: what it changes, and that nothing but (seed, step, sample) decides it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from raytide.actors.trainer.data.augment import Augmentation, fill_in_the_middle, uniform
from raytide.actors.trainer.data.token_dataset import Rows
from raytide.core.specs.mixture import AugmentSpec, FillInTheMiddle, MaskedInputs

FIM = FillInTheMiddle(rate=1.0, spm_rate=0.0, prefix=90, middle=91, suffix=92)
chances_of = st.lists(st.floats(0, 1, exclude_max=True), min_size=4, max_size=4)


def rows_of(count: int = 6, length: int = 24, *, seed: int = 0) -> Rows:
    random = np.random.default_rng(seed)
    tokens = random.integers(1, 80, (count, length + 1))
    tokens[random.random(tokens.shape) < 0.1] = 0
    ends = tokens[:, :-1] == 0
    return Rows(tokens, ~ends, np.cumsum(ends, axis=1) - ends)


@given(length=st.integers(0, 40), chances=chances_of, spm=st.booleans())
def test_the_middle_moves_behind_the_end_and_nothing_else_changes(length: int, chances: list[float], spm: bool) -> None:
    document = np.arange(1, length + 1)
    spec = FIM.model_copy(update={"spm_rate": 1.0 if spm else 0.0})
    out = fill_in_the_middle(document, spec, np.asarray(chances)).tolist()
    assert len(out) == length
    if out == document.tolist():
        return
    assert [token for token in out if token >= 90] == [90, 92, 91]
    before, rest = out[1 : out.index(92)], out[out.index(92) + 1 :]
    suffix, middle = rest[: rest.index(91)], rest[rest.index(91) + 1 :]
    whole = [*middle, *suffix] if spm else [*before, *middle, *suffix]
    assert before == [] or not spm
    assert whole == document[: length - 3].tolist()


def test_a_rate_is_the_share_of_documents() -> None:
    spec = FIM.model_copy(update={"rate": 0.3})
    chances = uniform(np.arange(4000, dtype=np.uint64), 4)
    document = np.arange(1, 201)
    changed = sum(not np.array_equal(fill_in_the_middle(document, spec, row), document) for row in chances)
    assert 0.26 <= changed / 4000 <= 0.34  # sd 0.007; a suffix shorter than three tokens stays


def test_sentinels_replace_no_end_of_a_document_and_no_padding() -> None:
    rows = rows_of()
    rows = rows._replace(learnt=rows.learnt & (rows.documents < 2))
    inputs, targets = Augmentation(AugmentSpec(fill_in_the_middle=FIM), 3)(rows, 7, np.arange(6))
    assert np.array_equal(inputs == 0, rows.tokens[:, :-1] == 0)
    padding = rows.documents >= 2
    assert np.array_equal(inputs[padding], rows.tokens[:, :-1][padding])
    assert (inputs >= 90).any()
    assert np.array_equal(targets != -100, rows.learnt)
    assert np.array_equal(targets[:, :-1][rows.learnt[:, :-1]], inputs[:, 1:][rows.learnt[:, :-1]])


@pytest.mark.parametrize("span", [1, 5])
def test_masks_cover_their_share_of_the_inputs_and_leave_targets(span: int) -> None:
    rows = rows_of(200, 256)
    plain_inputs, plain_targets = rows.examples()
    augment = Augmentation(AugmentSpec(masked_inputs=MaskedInputs(rate=0.15, token=95, span=span)), 1)
    inputs, targets = augment(rows, 4, np.arange(200))
    assert np.array_equal(targets, plain_targets)
    hit = inputs == 95
    assert 0.11 <= hit.mean() <= 0.16  # the last token of each document stays
    assert np.array_equal(inputs[~hit], plain_inputs[~hit])
    assert not hit[plain_inputs == 0].any()


def test_a_sample_is_changed_alike_in_any_batch_and_otherwise_at_another_step() -> None:
    spec = AugmentSpec(fill_in_the_middle=FIM, masked_inputs=MaskedInputs(rate=0.2, token=95, span=3))
    rows, ids = rows_of(8), np.arange(100, 108)
    whole = Augmentation(spec, 5)(rows, 9, ids)
    pick = np.asarray([6, 1])
    some = Augmentation(spec, 5)(Rows(*(each[pick] for each in rows)), 9, ids[pick])
    assert all(np.array_equal(a, b[pick]) for a, b in zip(some, whole, strict=True))
    for seed, step, numbers in ((6, 9, ids), (5, 10, ids), (5, 9, ids + 1)):
        assert not np.array_equal(Augmentation(spec, seed)(rows, step, numbers)[0], whole[0])


def test_the_random_numbers_never_change_between_releases() -> None:
    assert uniform(np.asarray([7], np.uint64), 2).tolist() == [[0.3898297483912715, 0.01678829452815611]]


@pytest.mark.parametrize(
    "fields",
    [
        {"fill_in_the_middle": {"prefix": 1, "middle": 1, "suffix": 2}},
        {"masked_inputs": {"rate": 1.0, "token": 3}},
        {"masked_inputs": {"rate": 0.1, "token": -3}},
    ],
)
def test_augmentation_that_makes_no_sense_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        AugmentSpec.model_validate(fields)
