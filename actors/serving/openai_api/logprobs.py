"""Log probabilities in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydantic import BaseModel

from raytide.actors.engine.types import TokenLogprobs

ScoredToken = tuple[int, TokenLogprobs | None]
"""A token and its log probabilities; None for the first token of a prompt."""

TokenBytes = Callable[[int], bytes]

_LEAST = -9999.0
"""OpenAI's value for an impossible token: JSON has no infinity."""


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""A prompt's log probabilities as in vLLM: at each place those of its token and of the most likely ones, by id."""


def prompt_logprobs(scored: Sequence[ScoredToken], bytes_of: TokenBytes) -> PromptLogprobs:
    found: PromptLogprobs = []
    for token, figures in scored:
        if figures is None:
            found.append(None)
            continue
        ranked = [(other, logprob, rank) for rank, (other, logprob) in enumerate(figures.top, 1)]
        found.append(
            {
                each: PromptLogprob(logprob=max(logprob, _LEAST), rank=rank, decoded_token=_text(bytes_of(each)))
                for each, logprob, rank in [(token, figures.logprob, figures.rank), *ranked]
            }
        )
    return found


def token_names(token: int) -> bytes:
    """Returns the name `token_id:N` of the token N. The name replaces the token's text if a request asks for token ids.
    vLLM has these names because some tokens are not valid text on their own.
    """
    return f"token_id:{token}".encode()


def chat_logprobs(scored: Sequence[ScoredToken], bytes_of: TokenBytes) -> ChatLogprobs:
    def top(token: int, logprob: float) -> TopLogprob:
        raw = bytes_of(token)
        return TopLogprob(token=_text(raw), logprob=max(logprob, _LEAST), bytes=list(raw))

    return ChatLogprobs(
        content=[
            TokenLogprob(
                **top(token, figures.logprob).model_dump(),
                top_logprobs=[top(other, logprob) for other, logprob in figures.top],
            )
            for token, figures in scored
            if figures is not None
        ]
    )


def text_logprobs(scored: Sequence[ScoredToken], bytes_of: TokenBytes, offset: int = 0) -> TextLogprobs:
    """Returns the log probabilities of a text in the format of OpenAI's completions. `offset` is the position of the
    first token in the text, in characters.
    """
    found = TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token, figures in scored:
        text = _text(bytes_of(token))
        found.tokens.append(text)
        found.text_offset.append(offset)
        offset += len(text)
        if figures is None:
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
            continue
        found.token_logprobs.append(max(figures.logprob, _LEAST))
        # OpenAI always has the chosen token among them.
        among = {_text(bytes_of(other)): max(logprob, _LEAST) for other, logprob in figures.top}
        found.top_logprobs.append(among | {text: max(figures.logprob, _LEAST)})
    return found


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")
