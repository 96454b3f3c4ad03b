"""Incremental detokenization: the emitted texts add up to the tokenizer's decode of all tokens, and never split a
character.
"""

from __future__ import annotations

import codecs
import json
import re
from functools import cached_property
from typing import Any, Protocol

from raytide.actors.engine.text.tokenizer import Tokenizer


class Detokenizer(Protocol):
    """Turns the tokens of one sequence into text, one token at a time."""

    def push(self, token: int) -> str:
        """Returns the text that a new token completes. The text may be empty."""

    def flush(self) -> str:
        """Returns the remaining text at the end of the sequence. An incomplete character becomes U+FFFD, as in a
        decoding of all tokens at once.
        """


class Vocabulary:
    """A model's vocabulary, which creates detokenizers. Byte-level decoders (GPT-2, Llama 3, Qwen) get a detokenizer of
    bytes. All others (SentencePiece, WordPiece) get a detokenizer of pieces.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = _decoder_kinds(json.loads(tokenizer.rust.to_str()).get("decoder"))
        self._is_byte_level = kinds == ["ByteLevel"]
        self._has_bytes = "ByteFallback" in kinds
        self._joins_bytes = "ByteLevel" in kinds
        added = tokenizer.rust.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}

    def stream(self) -> Detokenizer:
        return _ByteStream(self) if self._is_byte_level else _PieceStream(self)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)

    def bytes_of(self, token: int) -> bytes:
        """Returns the bytes of a byte-level token. Returns b"" for a special or unknown token."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = _unmap(self._piece(token) or "")
        return known

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes that a token has in the middle of a text. For a special token, returns its name."""
        piece = self._tokenizer.rust.id_to_token(token) or ""
        if token in self._special:
            return piece.encode()
        if self._is_byte_level:
            return self.bytes_of(token)
        if self._has_bytes and _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        return self.decode([*self._before, token])[len(self.decode(self._before)) :].encode()

    @cached_property
    def _before(self) -> list[int]:
        """A list of one token with text: a token decoded after it is in the middle of a text."""
        texts = ((token, self.decode([token])) for token in range(self._tokenizer.rust.get_vocab_size()))
        return [next(token for token, text in texts if text.strip().isalpha())]

    def has_text(self, token: int) -> bool:
        """Returns whether the decoder writes text for a token. Special and unknown tokens have no text."""
        return self._piece(token) is not None

    def is_open(self, token: int, text: str) -> bool:
        """Returns whether the next token can change how the end of `text` is decoded. `token` is the last token of
        `text`.

        A run of byte tokens is decoded as text if it is valid UTF-8 as a whole. Otherwise each byte becomes one U+FFFD.
        """
        if self._has_bytes:
            return _BYTE_TOKEN.fullmatch(self._piece(token) or "") is not None
        return self._joins_bytes and text.endswith("\ufffd")

    def _piece(self, token: int) -> str | None:
        piece: str | None = None if token in self._special else self._tokenizer.rust.id_to_token(token)
        return piece


class _ByteStream:
    """Incremental UTF-8 decoding that replaces invalid bytes. Python replaces the same byte ranges as the tokenizer's
    Rust code.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._bytes_of = vocabulary.bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._bytes_of(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _PieceStream:
    """Decodes new tokens together with the piece before them, as they are in the middle of a text, and emits text once
    it is final. The work for a token does not grow with the text.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._context: list[int] = []  # the last emitted piece
        self._new: list[int] = []
        self._begun = ""  # the context's text

    def push(self, token: int) -> str:
        vocabulary = self._vocabulary
        if not vocabulary.has_text(token):
            return ""
        self._new.append(token)
        if vocabulary.is_open(token, ""):
            return ""
        return self._emit(final=False)

    def flush(self) -> str:
        return self._emit(final=True) if self._new else ""

    def _emit(self, final: bool) -> str:
        text = self._vocabulary.decode(self._context + self._new)
        if not final and self._vocabulary.is_open(self._new[-1], text):
            return ""
        emitted = text[len(self._begun) :]
        self._context, self._new = self._new[-1:], []
        self._begun = self._vocabulary.decode(self._context)
        return emitted


def _alphabet() -> dict[str, int]:
    """Returns GPT-2's map from printable characters to bytes: printable Latin-1 characters stand for themselves, all
    other bytes for characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    for shift, byte in enumerate(sorted(set(range(256)) - set(printable))):
        table[chr(256 + shift)] = byte
    return table


_BYTE_OF = _alphabet()


def _decoder_kinds(decoder: dict[str, Any] | None) -> list[str]:
    """Returns the types of a decoder's steps in tokenizer.json."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [kind for step in decoder["decoders"] for kind in _decoder_kinds(step)]
    return [decoder["type"]]


_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _unmap(text: str) -> bytes:
    """Returns a byte-level token's bytes. A token with characters outside the alphabet (an added token) stands for its
    own UTF-8.
    """
    if all(char in _BYTE_OF for char in text):
        return bytes(_BYTE_OF[char] for char in text)
    return text.encode()
