"""Encodes texts to token ids with `fastokens` if it is exact, otherwise with `tokenizers`.

`fastokens` is about a hundred times faster, but is made for inference and does not support every tokenizer. Every
build compares the two engines on PROBES and on a sample of each chunk's documents. If the engines differ in any id,
the build uses `tokenizers`. The choice of the engine depends only on the inputs. Both engines encode a special token
as ordinary text if it is spelled out in a document.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from raytide.core.errors import ClusterError, DataError
from raytide.pipelines.readers.conversation import TURN_END_MARK, TURN_START_MARK
from raytide.pipelines.tokenizer.bpe import load_bpe

if TYPE_CHECKING:
    from fastokens import Tokenizer as FastTokenizer
    from tokenizers import Tokenizer

EngineName = Literal["fastokens", "tokenizers"]
Ids = NDArray[np.uint32]
Lengths = NDArray[np.int64]

_MARKS = re.compile(f"([{TURN_START_MARK}{TURN_END_MARK}])")
PROBES = (
    "",
    " ",
    "\n\n\t \r\n  \u00a0\u2003\u3000x",
    "It's we'll I'VE don't; 1234567890 3.14e-10 0x7fff _a__b--c++ ==> <= //",
    "ünïcödé ﬁ ﷺ İıſK Å Å e\u0301\u0323 \u1100\u1161\u11a8 각 ｶﾞ",
    "漢字かなカナ 한국어 العربية עברית हिन्दी ไทย 𝒜𝔅 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "\x00\x01\x7f\u0085\u200b\ufeff\u2028\ufffd\ue000\U0010ffff",
    "\u1c89\u1c8a \ua7cb \ua7da\ua7dc \U00010d50\U00010d70 \U00016ea0",  # letters of Unicode 16 and 17
    "a" * 300 + " " * 300 + "9" * 50 + "!" * 100,
)
"""Texts on which tokenizers differ if their Unicode tables or their treatment of white space differ."""
CHECKED_SHARE = 500
"""One character in this many is compared with `tokenizers`, but at least CHECKED_CHARS characters of a chunk."""
CHECKED_CHARS = 2048
CHECKED_DOCUMENTS = 16


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """A tokenizer, the name of the engine that encodes with it, and the versions of the engines `fastokens` and
    `tokenizers`.
    """

    name: EngineName
    tokenizer: bytes
    versions: tuple[tuple[str, str], ...]

    def open(self) -> TokenEngine:
        """Returns the engine, which is created once in each process. Raises ClusterError if the engine versions
        installed here differ from `versions`.
        """
        if self.versions != engine_versions():
            raise ClusterError(
                f"this node has {describe(engine_versions())}; the build started with {describe(self.versions)}.",
                hint="Install the same versions on every node.",
            )
        return _open(self)

    def reference(self) -> TokenEngine:
        """Returns the reference engine `tokenizers`, whose ids are correct by definition."""
        return EngineSpec("tokenizers", self.tokenizer, self.versions).open()


class TokenEngine(Protocol):
    def encode(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """Returns (ids of all texts, number of ids of each text). The ids of the texts follow each other."""


@lru_cache(maxsize=1)
def engine_versions() -> tuple[tuple[str, str], ...]:
    return tuple((name, version(name)) for name in ("fastokens", "tokenizers"))


def describe(versions: tuple[tuple[str, str], ...]) -> str:
    return " and ".join(f"{name} {number}" for name, number in versions)


@lru_cache(maxsize=4)
def _open(spec: EngineSpec) -> TokenEngine:
    return FastEngine(spec.tokenizer) if spec.name == "fastokens" else ReferenceEngine(spec.tokenizer)


class FastEngine:
    """The `fastokens` engine. It releases the GIL while it encodes, so threads run in parallel."""

    def __init__(self, tokenizer: bytes) -> None:
        from fastokens import Tokenizer

        self._tokenizer: FastTokenizer = Tokenizer.from_json_str(tokenizer.decode())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        ids, offsets = self._tokenizer.encode_batch_flat(
            list(texts), add_special_tokens=False, split_special_tokens=True
        )
        return np.frombuffer(ids, "<u4"), np.diff(np.frombuffer(offsets, "<u8").astype(np.int64))


class ReferenceEngine:
    """The `tokenizers` engine. It uses one thread, because there is a worker for each CPU."""

    def __init__(self, tokenizer: bytes) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._tokenizer: Tokenizer = load_bpe(tokenizer, "the tokenizer")

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        found = [
            np.array(encoding.ids, np.uint32)
            for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ]
        return np.concatenate([np.zeros(0, np.uint32), *found]), np.array([len(ids) for ids in found], np.int64)


def choose_engine(tokenizer: bytes) -> EngineSpec:
    """Returns the spec with `fastokens` if `fastokens` loads the tokenizer and agrees with `tokenizers` on PROBES.
    Otherwise returns the spec with `tokenizers`.
    """
    fast = EngineSpec("fastokens", tokenizer, engine_versions())
    slow = EngineSpec("tokenizers", tokenizer, engine_versions())
    try:
        engine = fast.open()
    except Exception:  # the library raises errors of many kinds for a tokenizer that it does not know
        return slow
    return fast if agree(engine, slow.open(), [*PROBES, *_spelled_out(tokenizer)]) else slow


def _spelled_out(tokenizer: bytes) -> list[str]:
    added = load_bpe(tokenizer, "the tokenizer").get_added_tokens_decoder().values()
    return [f"a {token.content}{token.content} b{token.content}" for token in list(added)[:64]]


def agree(engine: TokenEngine, reference: TokenEngine, texts: Sequence[str]) -> bool:
    """Returns whether two engines give the same ids for every text."""
    try:
        (ids, lengths), (expected, expected_lengths) = engine.encode(texts), reference.encode(texts)
    except Exception:  # of the library, for a text that it cannot encode
        return False
    return np.array_equal(lengths, expected_lengths) and np.array_equal(ids, expected)


def sample_of(texts: Sequence[str]) -> list[str]:
    """Returns pieces of evenly spaced texts. The total length of the pieces is about 1 / CHECKED_SHARE of all
    characters, but at least about CHECKED_CHARS characters if the texts are long enough.

    Each piece is taken from another place in its text. If all pieces came from the beginnings, they would show
    little about texts that begin alike, such as source files with a licence.
    """
    if not texts:
        return []
    chosen = texts[:: max(1, len(texts) // CHECKED_DOCUMENTS)]
    chars = max(CHECKED_CHARS, sum(map(len, texts)) // CHECKED_SHARE) // len(chosen)
    starts = (max(0, len(text) - chars) * i // len(chosen) for i, text in enumerate(chosen))
    return [text[start : start + chars] for text, start in zip(chosen, starts, strict=True)]


def encode_marked(engine: TokenEngine, texts: Sequence[str], start_id: int, end_id: int) -> tuple[Ids, Lengths]:
    """Encodes rendered conversations. The noncharacters that begin and end a turn become `start_id` and `end_id`."""
    pieces: list[str] = []
    marks: list[int] = []
    """The token that follows each piece: a turn's start or end, or -1 for none."""
    counts = []
    for text in texts:
        before = len(pieces)
        for piece, mark in _pieces(text):
            pieces.append(piece)
            marks.append({"": -1, TURN_START_MARK: start_id, TURN_END_MARK: end_id}[mark])
        counts.append(len(pieces) - before)
    ids, lengths = engine.encode(pieces)
    marked = np.array(marks, np.int64)
    has_mark = marked >= 0
    ends = np.cumsum(lengths)[has_mark]
    piece_lengths = lengths + has_mark
    first_pieces = np.cumsum([0, *counts])[:-1] if counts else np.zeros(0, np.int64)
    text_lengths = np.add.reduceat(piece_lengths, first_pieces) if counts else np.zeros(0, np.int64)
    return np.insert(ids, ends, marked[has_mark]).astype(np.uint32), text_lengths.astype(np.int64)


def _pieces(text: str) -> list[tuple[str, str]]:
    """Returns the pieces of text between marks, each with the mark that follows it."""
    split = _MARKS.split(text)
    return list(zip(split[::2], [*split[1::2], ""], strict=True))


def turn_ids(tokenizer: bytes, start: str, end: str) -> tuple[int, int]:
    """Returns the ids of the tokens that start and end a turn. Raises DataError if the tokenizer has no such tokens."""
    loaded = load_bpe(tokenizer, "the tokenizer")
    start_id, end_id = loaded.token_to_id(start), loaded.token_to_id(end)
    if start_id is None or end_id is None:
        raise DataError(
            f"the tokenizer has no tokens {start} and {end}, which mark the turns of a conversation.",
            hint="Train the tokenizer, or give one with these tokens.",
        )
    return start_id, end_id
