"""The statistics are those of transformers' logits; a gate is broken by what it limits, and by what is missing."""

from __future__ import annotations

import argparse
import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from tests.actors.engine.tiny import VOCAB, save_llama
from transformers import LlamaForCausalLM

from raytide.actors.quality.divergence import QualitySums, divergence
from raytide.actors.quality.evaluate import evaluate
from raytide.actors.quality.suite import HeldOutText, QualityGate, QualitySuite, broken_limits
from raytide.core.errors import ConfigError, DataError

WINDOW = 32


class Pair:
    """A model and its parent: the same weights with noise."""

    def __init__(self, folder: Path) -> None:
        self.parent_dir, self.model_dir = folder / "parent", folder / "model"
        self.parent = save_llama(self.parent_dir)
        self.model: LlamaForCausalLM = save_llama(self.model_dir)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        self.model.save_pretrained(self.model_dir)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token ids, a document a line: two of three windows each, the last one shorter, and one of a single token."""
    generator = torch.Generator().manual_seed(3)
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    documents = [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in (80, 70, 1)]
    path.write_text("".join(json.dumps({"tokens": each}) + "\n" for each in documents))
    return path


def suite(pair: Pair, path: Path, **gate: float) -> QualitySuite:
    corpora = {"ids": HeldOutText(path=str(path))}
    return QualitySuite(
        parent=str(pair.parent_dir), corpora=corpora, window=WINDOW, dtype="float32", gate=QualityGate(**gate)
    )


def test_the_statistics_are_those_of_the_reference_s_logits(pair: Pair, rows: Path) -> None:
    found = evaluate(str(pair.model_dir), suite(pair, rows)).corpora["ids"]
    kl, nll, parent_nll, same = [], [], [], []
    for line in rows.read_text().splitlines():
        tokens = torch.tensor(json.loads(line)["tokens"])
        for window in tokens.split(WINDOW):
            if len(window) < 2:
                continue
            with torch.inference_mode():
                p, q = (m(window[None, :-1]).logits[0].log_softmax(-1) for m in (pair.parent, pair.model))
            kl.append((p.exp() * (p - q)).sum(-1))
            same.append(p.argmax(-1) == q.argmax(-1))
            nll.append(-q.gather(1, window[1:, None])[:, 0])
            parent_nll.append(-p.gather(1, window[1:, None])[:, 0])
    kls, own, before = torch.cat(kl), torch.cat(nll), torch.cat(parent_nll)
    assert found.tokens == len(kls) == 80 - 3 + 70 - 3
    assert found.kl == pytest.approx(float(kls.mean()), rel=1e-3)
    assert found.kl_p99 == pytest.approx(float(kls.sort().values[math.ceil(0.99 * len(kls)) - 1]), rel=1e-3)
    assert found.same_top1 == pytest.approx(float(torch.cat(same).float().mean()))
    assert found.dnll == pytest.approx(float((own - before).mean()), abs=1e-4)
    assert found.perplexity == pytest.approx(float(own.mean().exp()), rel=1e-4)
    assert found.parent_perplexity == pytest.approx(float(before.mean().exp()), rel=1e-4)
    assert found.ppl_change == pytest.approx(found.perplexity / found.parent_perplexity - 1, rel=1e-6)


def test_a_model_differs_from_itself_by_nothing(pair: Pair, rows: Path) -> None:
    found = evaluate(str(pair.parent_dir), suite(pair, rows, max_kl=0.0, min_same_top1=1.0, max_ppl_change=0.0))
    assert found.corpora["ids"].dnll_error == 0
    assert broken_limits(QualityGate(max_kl=0.0, min_same_top1=1.0, max_ppl_change=0.0), found.metrics()) == ()


def test_the_error_of_the_difference_counts_windows_not_tokens() -> None:
    """Ten windows whose tokens all differ alike are ten observations, however many tokens they have."""
    sums, generator = QualitySums(), torch.Generator().manual_seed(0)
    offsets = torch.randn(10, generator=generator)
    for offset in offsets:
        sums.add(torch.ones(100) + offset, torch.ones(100))
    result = sums.result()
    assert result.dnll_error == pytest.approx(float(offsets.std() / 10**0.5), rel=1e-5)


def test_a_divergence_is_infinite_where_the_model_excludes_what_the_parent_allows() -> None:
    parent, model = torch.zeros(2, 4), torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, -math.inf]])
    kl, same = divergence(parent, model)
    assert kl[0] == 0
    assert math.isinf(kl[1])
    assert same == 2


def test_the_gate_names_each_limit_that_is_not_kept_over_all_corpora(pair: Pair, rows: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(Path(argparse.__file__).read_text()[:2000])
    both = suite(pair, rows)
    both = both.model_copy(update={"corpora": {**both.corpora, "text": HeldOutText(path=str(text), tokens=100)}})
    report = evaluate(str(pair.model_dir), both)
    assert report.corpora["text"].tokens == 100
    metrics = report.metrics()
    assert metrics["kl"] == max(metrics["ids_kl"], metrics["text_kl"])
    assert metrics["same_top1"] == min(metrics["ids_same_top1"], metrics["text_same_top1"])
    broken = broken_limits(QualityGate(max_kl=1e-9, min_same_top1=0.0, max_flips=0.5), metrics)
    assert broken == (
        f"kl is {metrics['kl']:g}, wanted at most 1e-09",
        "flips was not measured, wanted at most 0.5",
    )


def test_a_suite_whose_gate_limits_what_it_does_not_measure_is_refused(rows: Path) -> None:
    for gate, words in (({"max_kl": 0.1}, "needs parent"), ({"max_flips": 0.1}, "needs parent and tasks")):
        asked = QualitySuite.parse({"corpora": {"a": {"path": str(rows)}}, "gate": gate}, where="suite")
        with pytest.raises(ConfigError, match=words):
            evaluate("model", asked)
    with pytest.raises(ConfigError, match="give corpora, tasks or both"):
        QualitySuite.parse({}, where="suite")
    with pytest.raises(ConfigError, match="did you mean corpora"):
        QualitySuite.parse({"corpra": {}}, where="suite")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"tokens": [1, 2, 512]}\n', "line 1 has token ids outside of the vocabulary of 512"),
        ("a.jsonl", '{"text": 3}\n', "line 1 has no text 'text' and no tokens"),
        ("a.jsonl", "{\n", "line 1: "),
        ("a.jsonl", "[]\n", "line 1 is no JSON object"),
        ("a.txt", "", "has no token to predict"),
    ],
)
def test_a_bad_corpus_is_named_with_its_line(pair: Pair, tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=words):
        evaluate(str(pair.model_dir), suite(pair, tmp_path / name))


def test_models_of_different_vocabularies_are_not_compared(pair: Pair, rows: Path, tmp_path: Path) -> None:
    save_llama(tmp_path, vocab_size=VOCAB + 32)
    with pytest.raises(ConfigError, match="has a vocabulary of 544"):
        evaluate(str(tmp_path), suite(pair, rows))


def test_weights_that_are_not_finite_are_an_error(pair: Pair, rows: Path, tmp_path: Path) -> None:
    model = save_llama(tmp_path)
    with torch.no_grad():
        model.model.norm.weight[3] = math.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(DataError, match="not finite"):
        evaluate(str(tmp_path), suite(pair, rows))


@pytest.fixture
def endpoint(pair: Pair) -> Iterator[str]:
    """An endpoint that answers completions with the log probabilities of `pair.model`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"data": [{"id": "tiny"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            tokens = torch.tensor(asked["prompt"])
            with torch.inference_mode():
                log = pair.model(tokens[None]).logits[0].log_softmax(-1)
            values = [None, *log[:-1].gather(1, tokens[1:, None])[:, 0].tolist(), -0.1]
            self._answer({"choices": [{"logprobs": {"token_logprobs": values if asked["echo"] else []}}]})

        def _answer(self, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_endpoint_has_the_loss_of_its_directory(pair: Pair, rows: Path, endpoint: str) -> None:
    here = evaluate(str(pair.model_dir), suite(pair, rows)).corpora["ids"]
    there = evaluate(endpoint, suite(pair, rows)).corpora["ids"]
    assert there.dnll == pytest.approx(here.dnll, abs=1e-4)
    assert there.dnll_error == pytest.approx(here.dnll_error, rel=1e-2)
    assert there.kl is None
    with pytest.raises(ConfigError, match="no whole distributions"):
        evaluate(endpoint, suite(pair, rows, max_kl=0.1))
