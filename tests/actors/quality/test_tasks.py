"""Likelihoods of tasks are those of the reference; flips count samples that change sides."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tests.actors.engine.tiny import EOS, save_llama

from raytide.actors.quality.scorers import DirectoryScorer
from raytide.actors.quality.suite import TaskSuite
from raytide.actors.quality.tasks import _Likelihoods, _result, _task_run, run_tasks
from raytide.core.errors import ConfigError

WINDOW = 24


def test_the_likelihood_of_an_answer_is_that_of_its_tokens_after_the_end_of_the_context(tmp_path: Path) -> None:
    model = save_llama(tmp_path, num_hidden_layers=1)
    scorer = DirectoryScorer(tmp_path, "float32", WINDOW)
    tokenizer = scorer.tokenizer()
    assert tokenizer is not None
    likelihoods = _Likelihoods(scorer, tokenizer, WINDOW)
    for context in ("the quick ", "the quick brown fox jumps over the lazy dog and the quick "):
        both, given = tokenizer.encode(context + "parser"), len(tokenizer.encode(context.rstrip()))
        ids = torch.tensor(both[-WINDOW:])
        with torch.inference_mode():
            log = model(ids[None]).logits[0].log_softmax(-1)
        answer = len(both) - given
        expected = log[-answer - 1 : -1].gather(1, ids[-answer:, None]).sum()
        likelihood, is_greedy = likelihoods.continuation(context, "parser")
        assert likelihood == pytest.approx(float(expected), rel=1e-4)
        assert is_greedy is False

    text = "return self._get_values(action, arg_strings) " * 3
    tokens = tokenizer.encode(text)
    total = 0.0
    for at in range(0, len(tokens) - 1, WINDOW - 1):
        piece = torch.tensor(tokens[at : at + WINDOW])
        with torch.inference_mode():
            log = model(piece[None]).logits[0].log_softmax(-1)
        total += float(log[:-1].gather(1, piece[1:, None]).sum())
    assert likelihoods.text(text) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("answer", ["e", "the quick brown fox"])
def test_an_answer_without_context_follows_the_end_of_a_text(tmp_path: Path, answer: str) -> None:
    model = save_llama(tmp_path, num_hidden_layers=1)
    scorer = DirectoryScorer(tmp_path, "float32", WINDOW)
    tokenizer = scorer.tokenizer()
    assert tokenizer is not None
    ids = torch.tensor([EOS, *tokenizer.encode(answer)])
    with torch.inference_mode():
        log = model(ids[None]).logits[0].log_softmax(-1)
    expected = log[:-1].gather(1, ids[1:, None]).sum()
    likelihood, _ = _Likelihoods(scorer, tokenizer, WINDOW).continuation("", answer)
    assert likelihood == pytest.approx(float(expected), rel=1e-4)


def test_grades_between_right_and_wrong_do_not_flip() -> None:
    own = _task_run([{"doc_id": 0, "acc": 0.412}, {"doc_id": 1, "acc": 1.0}], {})
    before = _task_run([{"doc_id": 0, "acc": 0.413}, {"doc_id": 1, "acc": 1.0}], {})
    found = _result(own, before)
    assert (found.accuracy, found.flips) == (pytest.approx(0.706), None)


def test_flips_move_while_the_accuracy_stands() -> None:
    own = _task_run([{"doc_id": 1, "acc": 0.0}, {"doc_id": 0, "acc": 1.0}], {})
    before = _task_run([{"doc_id": 0, "acc": 0.0}, {"doc_id": 1, "acc": 1.0}], {})
    found = _result(own, before)
    assert found.accuracy == found.parent_accuracy == 0.5
    assert found.flips == 1.0
    assert _result(own, None).flips is None


def test_without_lm_eval_the_error_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llama(tmp_path, num_hidden_layers=1)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match="pip install lm_eval"):
        run_tasks(TaskSuite(names=("arc",)), DirectoryScorer(tmp_path, "float32", WINDOW), None, WINDOW)
