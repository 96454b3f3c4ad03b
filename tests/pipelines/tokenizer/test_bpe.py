import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from raytide.core.errors import DataError
from raytide.core.io.storage import sha256
from raytide.core.specs.data import TrainTokenizer
from raytide.pipelines.tokenizer.bpe import (
    EOS,
    PAD,
    SPECIAL_TOKENS,
    eos_id_of,
    load_bpe,
    tokenizer_config,
    train_bpe,
    vocab_size_of,
)

TEXTS = [f"def f{i}(self): return self.value + {i}  # größer ☃\n" for i in range(50)]
TRAINED = train_bpe(TEXTS, TrainTokenizer(vocab_size=330))


def test_training_twice_gives_the_same_bytes() -> None:
    assert train_bpe(iter(TEXTS), TrainTokenizer(vocab_size=330)) == TRAINED


@pytest.mark.parametrize("threads", [1, 4])
def test_training_does_not_depend_on_the_number_of_threads(threads: int) -> None:
    code = (
        "from raytide.core.specs.data import TrainTokenizer; from raytide.pipelines.tokenizer.bpe import train_bpe\n"
        "from raytide.core.io.storage import sha256; import sys\n"
        "print(sha256(train_bpe(eval(sys.stdin.read()), TrainTokenizer(vocab_size=330))))"
    )
    env = {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true", "PYTHONPATH": ":".join(sys.path)}
    shown = subprocess.run([sys.executable, "-c", code], input=repr(TEXTS), capture_output=True, text=True, env=env)
    assert shown.stdout.strip() == sha256(TRAINED), shown.stderr


def test_a_tokenizer_has_its_special_tokens_first_and_the_vocabulary_asked_for() -> None:
    tokenizer = load_bpe(TRAINED, "t")
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    assert vocab_size_of(tokenizer) == 330


def test_a_tiny_corpus_gives_a_smaller_vocabulary_that_still_spells_every_byte() -> None:
    tokenizer = load_bpe(train_bpe(["ab"], TrainTokenizer(vocab_size=4096)), "t")
    assert vocab_size_of(tokenizer) == len(SPECIAL_TOKENS) + 256 + 1
    assert tokenizer.decode(tokenizer.encode("ß\x00☃").ids) == "ß\x00☃"


def test_a_vocabulary_with_gaps_needs_a_row_for_each_id_up_to_the_highest() -> None:
    body = json.loads(TRAINED)
    body["model"]["vocab"] |= {"zz": 1000}
    assert vocab_size_of(load_bpe(json.dumps(body).encode(), "t")) == 1001


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    tokenizer = load_bpe(TRAINED, "t")
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_a_special_token_spelled_out_in_a_document_stays_text() -> None:
    tokenizer = load_bpe(TRAINED, "t")
    assert eos_id_of(tokenizer, EOS, "t") not in tokenizer.encode(f"a {EOS} b").ids


def test_a_file_that_is_no_tokenizer_is_refused_by_name() -> None:
    for data in (b"{}", b"\xff", b""):
        with pytest.raises(DataError, match=r"mine\.json is not a tokenizer"):
            load_bpe(data, "mine.json")


def test_a_tokenizer_without_the_end_token_is_refused() -> None:
    with pytest.raises(DataError, match=r"mine\.json has no end-of-document token '</s>'"):
        eos_id_of(load_bpe(TRAINED, "mine.json"), "</s>", "mine.json")


def test_transformers_loads_the_tokenizer_and_agrees_with_it(tmp_path: Path) -> None:
    tokenizer = load_bpe(TRAINED, "t")
    (tmp_path / "tokenizer.json").write_bytes(TRAINED)
    (tmp_path / "tokenizer_config.json").write_bytes(tokenizer_config(tokenizer, EOS))
    for cls in (AutoTokenizer, PreTrainedTokenizerFast):
        loaded = cls.from_pretrained(str(tmp_path))
        assert (loaded.eos_token, loaded.eos_token_id, loaded.pad_token) == (EOS, 0, PAD)
        for text in [*TEXTS[:5], " leading  spaces , and .\n\n"]:
            ids = loaded(text)["input_ids"]
            assert ids == tokenizer.encode(text, add_special_tokens=False).ids
            assert loaded.decode(ids) == text
        shown = loaded.apply_chat_template(
            [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
        )
        assert shown == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_tokenizer_without_our_tokens_gets_no_chat_template_and_pads_with_its_end() -> None:
    from tokenizers import Tokenizer, models

    foreign = Tokenizer(models.WordLevel({"</s>": 0, "a": 1}, unk_token="a"))
    config = json.loads(tokenizer_config(foreign, "</s>"))
    assert config["pad_token"] == "</s>"
    assert "chat_template" not in config
