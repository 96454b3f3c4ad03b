"""Rows of whole documents, held-out documents, and several datasets read as one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.actors.trainer.token_files import EOS, random_documents, write_documents

from raytide.actors.trainer.data.mixture_dataset import JoinedData, create_sampler, open_evaluation, open_tokens
from raytide.actors.trainer.data.packed_dataset import PackedData, pairs_of
from raytide.actors.trainer.data.token_dataset import TokenData
from raytide.actors.trainer.model.loss import IGNORE
from raytide.core.errors import DataError
from raytide.core.specs.mixture import MixtureSpec
from raytide.core.specs.train import TrainSpec

SEQ_LEN = 16


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))


def documents_of(data: PackedData) -> list[list[int]]:
    """Every piece of every row with its targets: [inputs..., the last target] where that counts."""
    rows = data.rows(np.arange(data.n_sequences))
    inputs, targets = rows.examples()
    out = []
    for row in range(data.n_sequences):
        used = int(data.plan.pieces(row)[1].sum())
        for number in np.unique(rows.documents[row, :used]):
            here = np.flatnonzero(rows.documents[row, :used] == number)
            assert np.array_equal(here, np.arange(here[0], here[-1] + 1))
            assert np.array_equal(targets[row, here[:-1]], inputs[row, here[1:]])
            last = int(targets[row, here[-1]])
            out.append([*inputs[row, here].tolist(), *([last] if last != IGNORE else [])])
        assert (targets[row, used:] == IGNORE).all()
        assert (rows.documents[row, used:] == len(data.plan.pieces(row)[0])).all()
    return out


def test_rows_hold_each_document_once_with_no_target_across_its_end(tmp_path: Path) -> None:
    documents = random_documents(60, longest=40)
    data = PackedData(TokenData(str(write_documents(tmp_path / "d", documents)), SEQ_LEN))
    wanted = []
    for document in documents:
        for begin in range(0, len(document), SEQ_LEN):
            goes_on = begin + SEQ_LEN < len(document)
            wanted.append(document[begin : begin + SEQ_LEN + goes_on])
    assert sorted(documents_of(data)) == sorted(wanted)
    assert data.n_tokens == sum(map(len, documents))


def test_a_last_document_without_an_end_token_stays_apart_from_others(tmp_path: Path) -> None:
    documents = [[1, 2, EOS], [3, EOS], [4, 5, 6]]
    data = PackedData(TokenData(str(write_documents(tmp_path / "d", documents)), 7))
    assert sorted(documents_of(data)) == sorted(documents)


def test_attention_pairs_agree_with_the_documents_of_the_rows(tmp_path: Path) -> None:
    data = PackedData(TokenData(str(write_documents(tmp_path / "d", random_documents(40, longest=30))), SEQ_LEN))
    ids = np.arange(data.n_sequences)
    padding = SEQ_LEN - np.asarray([data.plan.pieces(int(row))[1].sum() for row in ids])
    assert np.array_equal(pairs_of(data.rows(ids).documents), data.attention_pairs(ids) + padding**2)


def test_held_out_documents_and_the_others_make_up_the_dataset(tmp_path: Path) -> None:
    documents = random_documents(300, longest=12)
    data = TokenData(str(write_documents(tmp_path / "d", documents)), SEQ_LEN)
    train, held_out = PackedData(data, 0.2), PackedData(data, 0.2, of_held_out=True)
    assert sorted(documents_of(train) + documents_of(held_out)) == sorted(documents)
    assert not {tuple(each) for each in documents_of(train)} & {tuple(each) for each in documents_of(held_out)}
    assert 30 <= held_out.plan.lengths.size <= 90
    assert len({train.digest, held_out.digest, PackedData(data).digest}) == 3


def test_a_document_is_on_the_same_side_in_another_dataset(tmp_path: Path) -> None:
    documents = random_documents(100, longest=12)
    both = [documents, [*random_documents(50, longest=9, seed=1), *reversed(documents)]]
    sides = []
    for number, each in enumerate(both):
        data = TokenData(str(write_documents(tmp_path / str(number), each)), SEQ_LEN)
        sides.append({tuple(document) for document in documents_of(PackedData(data, 0.3, of_held_out=True))})
    assert sides[0] <= sides[1]


def test_a_fraction_that_holds_nothing_out_is_refused(tmp_path: Path) -> None:
    data = TokenData(str(write_documents(tmp_path / "d", [[1] * 30 + [EOS]])), SEQ_LEN)
    with pytest.raises(DataError, match="keeps none of its 1 documents for evaluation"):
        PackedData(data, 1e-9, of_held_out=True)


def test_chopped_rows_number_documents_by_their_end_tokens(tmp_path: Path) -> None:
    documents = [[1, 2, EOS], [3, EOS], [4, 5, 6, 7, 8, EOS]]
    data = TokenData(str(write_documents(tmp_path / "d", documents)), 5)
    rows = data.rows(np.arange(2))
    assert rows.documents.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]
    assert rows.learnt.all()


def test_several_datasets_read_as_one(tmp_path: Path) -> None:
    parts = [
        PackedData(TokenData(str(write_documents(tmp_path / str(seed), random_documents(20, longest=9, seed=seed))), 8))
        for seed in range(3)
    ]
    joined = JoinedData(parts)
    ids = np.random.default_rng(0).permutation(joined.n_sequences)
    rows = joined.rows(ids)
    whole = [np.concatenate(each) for each in zip(*(p.rows(np.arange(p.n_sequences)) for p in parts), strict=True)]
    assert all(np.array_equal(one, other[ids]) for one, other in zip(rows, whole, strict=True))
    pairs = np.concatenate([part.attention_pairs(np.arange(part.n_sequences)) for part in parts])
    assert np.array_equal(joined.attention_pairs(ids), pairs[ids])


def mixture_spec(folders: list[Path], out: Path, **fields: object) -> TrainSpec:
    sources = [{"dataset": str(folder)} for folder in folders]
    return TrainSpec.model_validate(
        {"dataset": {"sources": sources}, "out": str(out), "steps": 20, "global_batch": 4, "seq_len": 8, **fields}
    )


def test_a_dataset_that_grew_or_other_weights_are_another_digest(tmp_path: Path) -> None:
    folders = [write_documents(tmp_path / str(s), random_documents(40, longest=9, seed=s)) for s in range(2)]
    spec = mixture_spec(folders, tmp_path / "out", packing="best_fit")
    digests = {open_tokens(spec).digest}
    grown = write_documents(tmp_path / "grown/1", random_documents(41, longest=9, seed=1))
    weighted = MixtureSpec.model_validate(
        {"sources": [{"dataset": str(folder), "weight": w} for folder, w in zip(folders, (1, 3), strict=True)]}
    )
    for changes in (
        {"dataset": mixture_spec([folders[0], grown], tmp_path / "out").dataset},
        {"dataset": weighted},
        {"dataset": mixture_spec(folders[::-1], tmp_path / "out").dataset},
        {"packing": "chop"},
        {"seq_len": 9},
    ):
        digests.add(open_tokens(spec.model_copy(update=changes)).digest)
    assert len(digests) == 6
    assert open_tokens(spec.model_copy(update={"steps": 40, "micro_batch": 2})).digest in digests


def test_sources_made_with_different_tokenizers_are_refused(tmp_path: Path) -> None:
    documents = random_documents(20, longest=9)
    folders = [
        write_documents(tmp_path / "a", documents),
        write_documents(tmp_path / "b", documents, tokenizer='{"model": "another"}'),
    ]
    with pytest.raises(DataError, match=r"b was made with another tokenizer than .*a"):
        open_tokens(mixture_spec(folders, tmp_path / "out"))
    alone = mixture_spec(folders[:1], tmp_path / "out", eval={"dataset": str(folders[1])})
    with pytest.raises(DataError, match="made with another tokenizer"):
        open_evaluation(alone, open_tokens(alone))


def test_a_source_that_is_no_dataset_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing.*no manifest\.json"):
        open_tokens(mixture_spec([tmp_path / "missing"], tmp_path / "out"))


def test_the_evaluation_of_a_mixture_is_over_what_all_sources_hold_out(tmp_path: Path) -> None:
    folders = [write_documents(tmp_path / str(s), random_documents(200, longest=7, seed=s)) for s in range(2)]
    spec = mixture_spec(folders, tmp_path / "out", packing="best_fit", eval={"fraction": 0.25})
    training = open_tokens(spec)
    held_out = open_evaluation(spec, training)
    total = sum(json.loads((folder / "manifest.json").read_text())["tokens"] for folder in folders)
    sizes = training.sources  # type: ignore[attr-defined]
    assert sum(source.tokens for source in sizes) + held_out.n_tokens == total
    assert max(create_sampler(spec, training).ids(0)) < training.n_sequences
