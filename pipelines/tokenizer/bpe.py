"""Byte-level BPE with the `tokenizers` library. Trains or loads a tokenizer, and writes the files that transformers
needs.

Training is deterministic: the same texts in the same order give the same bytes, for any number of threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from raytide.core.errors import DataError
from raytide.core.specs.data import TrainTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EOS = "<|endoftext|>"
PAD = "<|pad|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (EOS, PAD, TURN_START, TURN_END)

NO_LIMIT = int(1e30)
"""transformers' value for a tokenizer without a length limit; the trainer's export writes the model's limit."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_bpe(texts: Iterable[str], options: TrainTokenizer) -> bytes:
    """Trains a tokenizer and returns its `tokenizer.json`. A small corpus may give fewer entries than
    `options.vocab_size`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=False).encode()


def load_bpe(data: bytes, where: str) -> Tokenizer:
    """Returns the tokenizer in a `tokenizer.json`. If the content is not a tokenizer, raises a DataError that names the
    file.

    Calls for the same content return the same object, so do not change it.
    """
    try:
        return _loaded(data)
    except Exception as error:  # the library raises plain Exception
        raise DataError(
            f"{where} is not a tokenizer: {error}.", hint="Give a tokenizer.json of the tokenizers library."
        ) from None


@lru_cache(maxsize=2)
def _loaded(data: bytes) -> Tokenizer:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(data.decode())
    # A special token inside a document is text and must not end the document.
    tokenizer.encode_special_tokens = True
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def vocab_size_of(tokenizer: Tokenizer) -> int:
    """Returns the highest token id plus one. This is the number of rows of an embedding table. Ids may have gaps."""
    entries = tokenizer.get_vocab_size(with_added_tokens=True)
    if None not in map(tokenizer.id_to_token, range(entries)):  # no gaps; a copy of the vocabulary takes twice as long
        return entries
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def eos_id_of(tokenizer: Tokenizer, eos: str, where: str) -> int:
    found = tokenizer.token_to_id(eos)
    if found is None:
        raise DataError(
            f"{where} has no end-of-document token {eos!r}.", hint="Set tokenizer.eos to one of its tokens."
        )
    return int(found)


def tokenizer_config(tokenizer: Tokenizer, eos: str) -> bytes:
    """Returns a `tokenizer_config.json` for transformers' AutoTokenizer and PreTrainedTokenizerFast."""
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": eos,
        "pad_token": PAD if tokenizer.token_to_id(PAD) is not None else eos,
        "model_max_length": NO_LIMIT,
    }
    if tokenizer.token_to_id(TURN_START) is not None and tokenizer.token_to_id(TURN_END) is not None:
        config["chat_template"] = CHAT_TEMPLATE
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
