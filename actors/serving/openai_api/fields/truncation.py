"""The fields `truncate_prompt_tokens` and `truncation_side`, as in vLLM. With them, prompts that are too long are cut
instead of refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from raytide.actors.serving.openai_api.errors import ApiError, invalid

Side = Literal["left", "right"]
Tokenize = Callable[[str], Awaitable[list[int]]]

_CHARS_OF_A_TOKEN = 4
"""The characters of a token that are assumed at first, in the search for a suffix of a long text with enough tokens."""
_MORE = 16
"""The search for a suffix of a long text ends once the suffix has this many tokens more than are kept."""


class TruncationFields(BaseModel):
    """The fields of a request that ask to cut a long prompt. Side `right` keeps the first tokens, and side `left` the
    last tokens.
    """

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    truncation_side: Side | None = None


@dataclass(frozen=True, slots=True)
class Truncation:
    """Cuts prompts to `length` tokens. `limit` is the context's length. Engines tokenize only the beginning of a text
    that is longer than the context.
    """

    length: int
    side: Side
    limit: int

    @classmethod
    def of(cls, asked: TruncationFields, limit: int, *, answer: int = 1, side: Side) -> Truncation | None:
        """Returns the truncation that a request asks for. Returns None if the request asks for none.

        A requested length of -1 leaves room for `answer` tokens. `side` is used if the request names no side. Raises
        ApiError (400) for a length of 0, and for a length that is not below the context's length.
        """
        length = asked.truncate_prompt_tokens
        if length is None:
            return None
        if length == -1:
            length = limit - answer if answer < limit else limit - 1
        if not 0 < length < limit:
            raise _refused(f"truncate_prompt_tokens is {length}; a prompt may have 1 to {limit - 1} tokens here.")
        return cls(length, asked.truncation_side or side, limit)

    def cut(self, tokens: Sequence[int], head: int = 0, tail: int = 0) -> list[int]:
        """Returns a prompt's tokens, cut to `length`. The first `head` and the last `tail` tokens are always kept."""
        if len(tokens) <= self.length:
            return list(tokens)
        kept = self.length - head - tail
        if kept <= 0:
            raise _refused(f"truncate_prompt_tokens is {self.length}; {head + tail} tokens cannot be cut.")
        end = len(tokens) - tail
        middle = tokens[head : head + kept] if self.side == "right" else tokens[end - kept : end]
        return [*tokens[:head], *middle, *tokens[end:]]

    async def text(self, text: str, tokenize: Tokenize) -> list[int]:
        """Returns the tokens of a text, cut to `length`. The special tokens at the beginning and the end are always
        kept.
        """
        special, tokens = await tokenize(""), await tokenize(text)
        if self.side == "left" and len(tokens) > self.limit:
            tokens = await self._end(text, tokenize)
        head = _common(tokens, special)
        return self.cut(tokens, head, _common(tokens[::-1], special[head:][::-1]))

    def pair(self, tokens: Sequence[int], first: Sequence[int], special: Sequence[int]) -> list[int]:
        """Returns the tokens of a pair of texts, cut to `length`. Only the second text is cut.

        `tokens` are the tokens of the pair. `first` are the tokens of the same pair with an empty second text.
        `special` are the tokens of a pair of two empty texts.
        """
        if self.side == "left" and len(tokens) > self.limit:
            raise _refused("a text beyond the context is cut on the right in a pair.", "truncation_side")
        tail = _common(tokens[::-1], special[::-1])
        return self.cut(tokens, len(first) - tail, tail)

    async def _end(self, text: str, tokenize: Tokenize) -> list[int]:
        """Returns the tokens of a suffix of the text: at least `length` tokens, and no more than the context has. A few
        extra tokens, where possible, make words begin at the same places as in the whole text.
        """
        least, most, best = 0, len(text), list[int]()
        size = min(most - 1, _CHARS_OF_A_TOKEN * self.length)
        while least < size < most:
            tokens = await tokenize(text[-size:])
            if len(tokens) > self.limit:
                most = size
            else:
                least, best = size, tokens
                if len(tokens) >= self.length + _MORE:
                    break
            size = (least + most) // 2
        if len(best) < self.length:
            raise _refused("no end of the text has so many tokens: shorten it, or cut the right.", "truncation_side")
        return best


def _common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Returns the length of the longest common prefix of both token lists."""
    pairs = zip(tokens, others, strict=False)
    return next((place for place, (one, two) in enumerate(pairs) if one != two), min(len(tokens), len(others)))


def _refused(message: str, param: str = "truncate_prompt_tokens") -> ApiError:
    return invalid(message, param=param)
