"""Token by token back to text, exactly: what comes out adds up to the tokenizer's decode of all tokens, and half a
character is held back until it is whole.
"""

from __future__ import annotations

import codecs
import json
from typing import Protocol

from raytide.actors.engine.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Vocabulary"]


class Detokenizer(Protocol):
    """The text stream of one sequence."""

    def push(self, token: int) -> str:
        """The text that this token completes, perhaps none."""
        ...

    def flush(self) -> str:
        """What is left when no more tokens come: half a character shows as U+FFFD, as the full decode has it."""
        ...


class Vocabulary:
    """Makes the streams of one model, by how its decoder works: byte-level ones (GPT-2, Llama 3, Qwen) are streams of
    bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = json.loads(tokenizer.rust.to_str()).get("decoder") or {}
        self._is_byte_level = decoder.get("type") == "ByteLevel"
        added = tokenizer.rust.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}

    def stream(self) -> Detokenizer:
        return _ByteStream(self) if self._is_byte_level else _WindowStream(self._tokenizer)

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a byte-level token stands for; a special or unknown one stands for none."""
        known = self._bytes.get(token)
        if known is None:
            text = None if token in self._special else self._tokenizer.rust.id_to_token(token)
            known = self._bytes[token] = _unmap(text or "")
        return known


class _ByteStream:
    """UTF-8 decoding with replacement, incrementally; Python and Rust replace the same maximal subparts."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._bytes_of = vocabulary.bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._bytes_of(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """For any other decoder: decode a short window with and without the new tokens, and emit the difference once it
    is whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._tokens: list[int] = []
        self._window = 0  # tokens before it no longer change the text
        self._emitted = 0  # tokens whose text is out

    def push(self, token: int) -> str:
        self._tokens.append(token)
        return self._advance(final=False)

    def flush(self) -> str:
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before = self._decode(self._tokens[self._window : self._emitted])
        after = self._decode(self._tokens[self._window :])
        if not final and (len(after) <= len(before) or after.endswith("\ufffd")):
            return ""
        self._window, self._emitted = self._emitted, len(self._tokens)
        return after[len(before) :]


def _alphabet() -> dict[str, int]:
    """GPT-2's map from printable characters to bytes: printable Latin-1 stands for itself, the rest is shifted above
    255.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    for shift, byte in enumerate(sorted(set(range(256)) - set(printable))):
        table[chr(256 + shift)] = byte
    return table


_BYTE_OF = _alphabet()


def _unmap(text: str) -> bytes:
    """A token that is not wholly in the alphabet (an added one) stands for its own UTF-8."""
    if all(char in _BYTE_OF for char in text):
        return bytes(_BYTE_OF[char] for char in text)
    return text.encode()
