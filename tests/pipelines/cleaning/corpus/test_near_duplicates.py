import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.pipelines.cleaning.corpus.planted import SIMILARITIES, expected, plant

from raytide.core.specs.cleaning import NearDuplicates
from raytide.pipelines.cleaning.corpus.minhash import Signatures, sign
from raytide.pipelines.cleaning.corpus.near_duplicates import SignatureStore, cluster, slots_of

SPEC = NearDuplicates()


def check_planted(documents: int, copies: int, tolerance: float, words: tuple[int, int]) -> None:
    """Recall by class of similarity is near the formula's, and what is dropped is near what is kept."""
    planted = plant(documents, copies, seed=1, words=words)
    clusters = cluster([sign(planted.ids, planted.lengths, SPEC)], SPEC.min_similarity)
    is_copy = planted.original != np.arange(documents)
    is_dropped = ~clusters.keep
    right = clusters.first[is_dropped] == planted.original[is_dropped]
    assert right.mean() >= 0.99
    for similarity in SIMILARITIES:
        of_class = is_copy & (np.abs(planted.similarity - similarity) < 0.05)
        formula = expected(planted.similarity[of_class]).mean()
        assert of_class.sum() > copies / 20
        assert is_dropped[of_class].mean() == pytest.approx(formula, abs=tolerance), similarity


def test_planted_copies_among_10_000_documents() -> None:
    """The acceptance test: with 1,000 copies a class, a share's standard error is up to 0.016."""
    check_planted(10_000, 5000, 0.05, (150, 600))


def test_planted_copies_of_short_and_long_documents() -> None:
    """With some 300 copies a class, a share's standard error is up to 0.03."""
    check_planted(6000, 3000, 0.08, (60, 120))
    check_planted(4000, 2000, 0.08, (1000, 1500))


def test_agreement_of_slots_estimates_the_similarity() -> None:
    """For short documents, most of whose slots are filled by hashes of their own, and for long ones."""
    for words in ((20, 40), (100, 200), (2000, 3000)):
        planted = plant(600, 300, seed=2, words=words)
        slots = sign(planted.ids, planted.lengths, SPEC).slots
        copies = np.flatnonzero(planted.original != np.arange(600))
        agreement = (slots[copies] == slots[planted.original[copies]]).mean(axis=1)
        errors = agreement - planted.similarity[copies]
        assert abs(errors.mean()) < 0.01, words
        assert errors.std() < 0.06, words


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 40))
@example(9231, 1)  # an original of fewer words than an n-gram
def test_signatures_do_not_depend_on_batches(seed: int, pieces: int) -> None:
    planted = plant(40, 10, seed, (1, 3000))
    whole = sign(planted.ids, planted.lengths, SPEC)
    bounds = np.linspace(0, 40, pieces + 1).astype(int)
    starts = np.concatenate([[0], np.cumsum(planted.lengths)])
    parts = [
        sign(planted.ids[starts[a] : starts[b]], planted.lengths[a:b], SPEC) for a, b in itertools.pairwise(bounds)
    ]
    assert (np.concatenate([part.bands for part in parts]) == whole.bands).all()
    assert (np.concatenate([part.slots for part in parts]) == whole.slots).all()
    copies = cluster(parts, 0.5).first
    assert (copies == cluster([whole], 0.5).first).all()


def test_the_first_of_a_chain_stays() -> None:
    rng = np.random.default_rng(0)
    row = rng.integers(0, 1000, 400)
    chain = [rng.integers(0, 1000, 400), row]
    for _ in range(5):
        row = row.copy()
        row[rng.integers(0, 400, 3)] = 5000
        chain.append(row)
    ids = np.concatenate(chain).astype(np.uint64)
    assert cluster([sign(ids, np.full(7, 400), SPEC)], 0.5).first.tolist() == [0, 1, 1, 1, 1, 1, 1]


def test_documents_near_an_earlier_dataset_are_dropped() -> None:
    planted = plant(200, 50, seed=3)
    starts = np.concatenate([[0], np.cumsum(planted.lengths)])
    earlier = sign(planted.ids[: starts[150]], planted.lengths[:150], SPEC)
    later = sign(planted.ids[starts[150] :], planted.lengths[150:], SPEC)
    apart = cluster([earlier, later], 0.5)
    assert (apart.first == cluster([sign(planted.ids, planted.lengths, SPEC)], 0.5).first).all()
    assert apart.keep[:150].all() and not apart.keep[150:].all()


def test_false_candidates_are_told_apart() -> None:
    """Two pairs share a bucket with a stranger that comes first."""
    slots = np.random.default_rng(0).integers(0, 1 << 16, (3, 112)).astype(np.uint16)[[0, 1, 2, 1, 2]]
    signatures = Signatures(slots, np.zeros((5, 1), np.uint64))
    assert cluster([signatures], 0.5).first.tolist() == [0, 1, 2, 1, 2]


def test_nothing_is_near_in_an_empty_corpus() -> None:
    assert cluster([], 0.5).keep.tolist() == []
    empty = sign(np.zeros(0, np.uint64), np.zeros(0, np.int64), SPEC)
    assert cluster([empty], 0.5).keep.tolist() == []


def test_a_store_gives_back_all_signatures_in_order() -> None:
    """Parts arrive in another order than that of the dataset."""
    planted = plant(50, 10, seed=4)
    whole = sign(planted.ids, planted.lengths, SPEC)
    store = SignatureStore(112)
    assert len(store.signatures([]).bands) == 0
    starts = (40, 0, 20)
    parts = [store.add(Signatures(whole.slots[at : at + 20], whole.bands[at : at + 20])) for at in starts]
    stored = store.signatures([parts[1], parts[2], parts[0]])
    assert (stored.bands == whole.bands).all()
    assert (slots_of(stored, np.arange(50)) == whole.slots).all()
    assert (cluster([stored], 0.5).first == cluster([whole], 0.5).first).all()
    store.close()
