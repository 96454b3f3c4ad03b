"""The data that a training spec accepts, and the fields that decide a resume."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from raytide.core.specs.train import TrainSpec

MIXTURE = {"sources": [{"dataset": "/a"}, {"dataset": "s3://b/c/", "name": ""}]}
CHAT = {"chat": {"file": "/talks.jsonl", "tokenizer": "/t"}}


def spec_of(**fields: Any) -> TrainSpec:
    data = {} if "chat" in fields else {"dataset": "/data"}
    return TrainSpec.model_validate({"out": "/out", "steps": 10, **data, **fields})


def test_a_mixture_names_its_datasets_and_sources() -> None:
    spec = spec_of(dataset=MIXTURE)
    assert spec.datasets == ("/a", "s3://b/c/")
    assert not isinstance(spec.dataset, str | None)
    assert [source.label for source in spec.dataset.sources] == ["a", "c"]
    assert TrainSpec.model_validate_json(spec.model_dump_json()) == spec
    assert spec_of().datasets == ("/data",)
    assert spec_of(**CHAT).datasets == ()


def test_documents_are_masked_with_best_fit_unless_the_spec_says_otherwise() -> None:
    assert not spec_of().masks_documents
    assert spec_of(packing="best_fit").masks_documents
    assert spec_of(document_masks=True).masks_documents
    assert not spec_of(packing="best_fit", document_masks=False).masks_documents


def test_what_changes_samples_changes_the_digest_and_nothing_else_does() -> None:
    """A run of an earlier release resumes: its digest is of seed, batch and length alone."""
    assert spec_of().digest() == "c31d80aff98571185429bf17c03739a899c1a6fe373b68475ea2889fd27d62aa"
    same = (
        {"steps": 99, "micro_batch": 1, "stream": {"cache_gb": 3}},
        {"eval": {"dataset": "/e", "every": 5}},
    )
    for fields in same:
        assert spec_of(**fields).digest() == spec_of().digest()
    others: tuple[dict[str, Any], ...] = (
        {"seed": 1},
        {"document_masks": True},
        {"augment": {"masked_inputs": {"rate": 0.1, "token": 3}}},
        {"augment": {"masked_inputs": {"rate": 0.1, "token": 3, "span": 2}}},
        {"stream": {"block": 8}},
        {"stream": {"block": 8, "window": 2}},
    )
    assert len({spec_of(**fields).digest() for fields in ({}, *others)}) == 7


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({**CHAT, "packing": "best_fit"}, "packing best_fit needs a dataset"),
        ({**CHAT, "document_masks": True}, "document_masks needs a dataset"),
        ({**CHAT, "augment": {}}, "augment needs a dataset"),
        ({**CHAT, "eval": {"dataset": "/e"}}, "eval needs a dataset"),
        ({**CHAT, "stream": {}}, "stream needs a dataset"),
        ({"eval": {"fraction": 0.1}}, "eval.fraction needs packing best_fit"),
        ({"eval": {}}, "give eval.dataset or eval.fraction"),
        ({"eval": {"dataset": "/e", "fraction": 0.1}}, "give eval.dataset or eval.fraction"),
        ({"eval": {"dataset": "/e", "every": 0}}, "greater than or equal to 1"),
        ({"dataset": MIXTURE, **CHAT}, "give either dataset or chat"),
        ({"dataset": {"sources": []}}, "at least 1 item"),
    ],
)
def test_data_that_makes_no_sense_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        spec_of(**fields)
