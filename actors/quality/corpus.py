"""Reads text corpora as windows of token ids, without holding a whole corpus in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raytide.actors.quality.suite import HeldOutText
from raytide.core.errors import DataError

if TYPE_CHECKING:
    from raytide.actors.engine.text.tokenizer import Tokenizer

_PIECE_CHARS = 1 << 16
"""The number of characters that are encoded at once. Pieces end after a line, so that hardly a word is cut."""


@dataclass(frozen=True, slots=True)
class Window:
    """A window of token ids. The first `given` tokens are only context. Each later token is predicted from all tokens
    before it.
    """

    tokens: list[int]
    given: int

    @property
    def targets(self) -> list[int]:
        return self.tokens[self.given :]


def corpus_digest(corpus: HeldOutText) -> str:
    """Returns the SHA-256 of a corpus's file, in hex. Raises DataError if the file cannot be read."""
    try:
        with Path(corpus.path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(corpus, error) from None


class CorpusReader:
    """Cuts corpora into windows. `tokenizer` may be None if every line of the corpora has token ids instead of text."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, window: int) -> None:
        self._tokenizer, self._vocab_size, self._window = tokenizer, vocab_size, window
        # Most models with a BOS have seen no text without it, and predict badly when it is missing.
        self._start = [] if tokenizer is None else tokenizer.encode("")
        if len(self._start) + 2 > window:
            raise DataError(f"a window of {window} tokens has no room for text.", hint="Raise window.")

    def windows(self, corpus: HeldOutText) -> Iterator[Window]:
        """Yields windows until their predicted tokens add up to `corpus.tokens`, or until the corpus ends. Raises
        DataError for an unreadable or empty corpus.
        """
        left, size = corpus.tokens, self._window - len(self._start)
        given = len(self._start) or 1
        for document in self._documents(corpus):
            for tokens in _cut(document, size):
                window = Window((self._start + tokens)[: given + left], given)
                if not window.targets:
                    continue
                yield window
                left -= len(window.targets)
                if not left:
                    return
        if left == corpus.tokens:
            raise DataError(f"{corpus.path} has no token to predict.", hint="Give a longer text.")

    def _documents(self, corpus: HeldOutText) -> Iterator[Iterator[list[int]]]:
        path = Path(corpus.path)
        try:
            with path.open(encoding="utf-8") as file:
                if path.suffix in (".jsonl", ".ndjson"):
                    for number, line in enumerate(file, start=1):
                        if line.strip():
                            yield self._line(line, corpus, f"{path}, line {number}")
                else:
                    yield self._encoded(_pieces(file), str(path))
        except OSError as error:
            raise _unreadable(corpus, error) from None
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8: {error.reason}.", hint="Convert the file.") from None

    def _line(self, line: str, corpus: HeldOutText, where: str) -> Iterator[list[int]]:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: {error}.", hint="Write one JSON object a line.") from None
        if not isinstance(row, dict):
            raise DataError(f"{where} is no JSON object.", hint="Write one JSON object a line.")
        if "tokens" in row:
            return iter([self._checked(row["tokens"], where)])
        text = row.get(corpus.field)
        if not isinstance(text, str):
            raise DataError(f"{where} has no text {corpus.field!r} and no tokens.", hint="Name the key by `field`.")
        return self._encoded(iter([text]), where)

    def _encoded(self, pieces: Iterator[str], where: str) -> Iterator[list[int]]:
        if self._tokenizer is None:
            raise DataError(
                f"{where} holds text, and the model has no tokenizer.json.",
                hint="Put the tokenizer beside the weights, or give JSONL lines with `tokens`.",
            )
        for piece in pieces:
            (tokens,) = self._tokenizer.encode_all([piece], plain=True)
            yield self._checked(tokens, where)

    def _checked(self, tokens: object, where: str) -> list[int]:
        if not isinstance(tokens, list) or not all(
            isinstance(each, int) and 0 <= each < self._vocab_size for each in tokens
        ):
            raise DataError(
                f"{where} has token ids outside of the vocabulary of {self._vocab_size}.",
                hint="Use text, or ids of this model's tokenizer.",
            )
        return tokens


def _unreadable(corpus: HeldOutText, error: OSError) -> DataError:
    return DataError(f"cannot read {corpus.path}: {error.strerror}.", hint="Check the path of the corpus.")


def _pieces(file: Iterator[str]) -> Iterator[str]:
    held, size = list[str](), 0
    for line in file:
        held.append(line)
        size += len(line)
        if size >= _PIECE_CHARS:
            yield "".join(held)
            held, size = [], 0
    if held:
        yield "".join(held)


def _cut(pieces: Iterator[list[int]], size: int) -> Iterator[list[int]]:
    held: list[int] = []
    for piece in pieces:
        held += piece
        while len(held) >= size:
            yield held[:size]
            held = held[size:]
    if held:
        yield held
