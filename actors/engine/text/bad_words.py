"""Bad words, which an output must not contain, as token sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items


class BadWords:
    """Bad words as token sequences. They are indexed by their second-last token, so that a step checks only words that
    the next token could complete. All samples of a request share one object.
    """

    def __init__(self, words: Iterable[tuple[int, ...]] = ()) -> None:
        self._words = tuple(words)
        self._always: list[int] = []
        self._after: dict[int, dict[int, dict[tuple[int, ...], list[int]]]] = {}  # then by the length of the start
        for *start, last in self._words:
            if start:
                by_start = self._after.setdefault(start[-1], {}).setdefault(len(start), {})
                by_start.setdefault(tuple(start), []).append(last)
            else:
                self._always.append(last)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self._words)

    def __len__(self) -> int:
        return len(self._words)

    def next_banned(self, tokens: list[int], output_len: int) -> list[int]:
        """Returns the tokens that would complete a bad word that starts in the output. The output is the last
        `output_len` tokens of `tokens`.
        """
        banned = list(self._always)
        if output_len and (by_length := self._after.get(tokens[-1])):
            for length, by_start in by_length.items():
                if length <= output_len:
                    banned += by_start.get(tuple(tokens[-length:]), ())
        return banned


def bad_word_tokens(
    words: Items[str],
    encode: Callable[[list[str]], list[list[int]]],
    spell: Callable[[str], list[int] | None],
    token_of: Callable[[str], int | None],
) -> BadWords:
    """Returns the token sequences of bad words: each word as the tokenizer encodes it alone and after a space. Other
    token sequences for the same word are not banned, although a model could generate them.

    `encode` tokenizes a list of texts. If a word is the name of a special token, that token is banned. An output
    could also spell the name with a sequence of ordinary tokens. `spell` returns this sequence, which is banned as
    well. `spell` returns None for a text without the name of a special token.
    """
    texts = [text for word in words for text in (word, f" {word.lstrip()}")]
    found: dict[tuple[int, ...], None] = dict.fromkeys(map(tuple, encode(texts)) if texts else ())
    found |= dict.fromkeys(tuple(spelled) for text in texts if (spelled := spell(text)) is not None)
    for word in words:
        inside = token_of(word)
        if inside is not None:
            found[(inside,)] = None
    found.pop((), None)
    return BadWords(found)
