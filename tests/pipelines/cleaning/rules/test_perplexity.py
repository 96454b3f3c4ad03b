"""Perplexities equal those of Hugging Face's model on the same tokens."""

import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from raytide.core.errors import DataError
from raytide.core.specs.cleaning import CleaningSpec, DocumentRules, PerplexityRule
from raytide.core.specs.data import TrainTokenizer
from raytide.pipelines.cleaning.cleaner import Cleaner
from raytide.pipelines.cleaning.rules.perplexity import perplexity_of, perplexity_rule
from raytide.pipelines.cleaning.stages import Place
from raytide.pipelines.tokenizer.bpe import load_bpe, train_bpe

TEXT = "the quick brown fox jumps over the lazy dog and the dog sleeps. " * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "tokenizer.json").write_bytes(train_bpe([TEXT], TrainTokenizer(vocab_size=300)))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def reference(model: Path, text: str, max_tokens: int) -> float:
    ids = torch.tensor([load_bpe((model / "tokenizer.json").read_bytes(), "x").encode(text).ids[:max_tokens]])
    network = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return math.exp(network(ids, labels=ids).loss.item())


@pytest.mark.parametrize(("text", "max_tokens"), [(TEXT, 64), (TEXT, 10_000), ("größe 東京", 64)])
def test_perplexity_is_hugging_face_s(model: Path, text: str, max_tokens: int) -> None:
    assert perplexity_of(text, str(model), max_tokens) == pytest.approx(reference(model, text, max_tokens), rel=1e-4)


def test_bounds_decide(model: Path) -> None:
    value = perplexity_of(TEXT, str(model), 512)
    low, high = value * 0.9, value * 1.1

    def reason(least: float, most: float, text: str = TEXT) -> str | None:
        return perplexity_rule(text, PerplexityRule(model=str(model), min_perplexity=least, max_perplexity=most))

    assert reason(low, high) is None
    assert reason(high, high + 1) == "perplexity_low"
    assert reason(0, low) == "perplexity_high"
    assert reason(0, low, "x") is None


def test_a_cleaner_names_the_model_s_version(model: Path) -> None:
    rules = DocumentRules(perplexity=PerplexityRule(model=str(model), max_perplexity=1e-3))
    cleaner = Cleaner(CleaningSpec(rules=rules))
    ((cleaned,),) = cleaner.clean_all([TEXT], [Place("")])
    assert cleaned.reason == "perplexity_high"
    ((name, _, version),) = cleaner.identity()
    assert name == f"model {model}" and len(version) > 64


def test_a_folder_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no config\.json"):
        Cleaner(CleaningSpec(rules=DocumentRules(perplexity=PerplexityRule(model=str(tmp_path), max_perplexity=1))))
