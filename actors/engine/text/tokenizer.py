"""Converts text to token ids and back with the `tokenizers` library. Uses the special ids and the chat template of the
model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer as RustTokenizer

from raytide.actors.engine.text.tool_prompt import checked_variables, format_of, left_open, turns_of
from raytide.actors.engine.text.worker_pool import TextPool
from raytide.actors.engine.types import PLAIN_PROMPT, ChatFormat, Message, PromptOptions, as_request_error
from raytide.actors.models.chat_template import ChatTemplate, spelled_names, with_marks
from raytide.actors.models.components.llava import VisionSpec
from raytide.actors.models.model_config import Fields, as_ids
from raytide.actors.models.tokenizer_files import WITH_TOKENIZER, TokenizerSource
from raytide.core.errors import DataError, EngineError, RaytideError, UsageError

T = TypeVar("T")

_INLINE_CHARS = 2000
_SLICE_CHARS = 1 << 16
_TORN_TOKENS = 16
"""An upper bound of the tokens that a slice has too many because words are cut at its ends."""


class Tokenizer:
    """The tokenizer of a model directory or GGUF file."""

    def __init__(self, model_dir: Path, vision: VisionSpec | None = None) -> None:
        source = TokenizerSource.read(model_dir)
        try:
            self.rust = RustTokenizer.from_buffer(source.tokenizer)
        except BaseException as cause:  # the library raises bare Exception, and panics
            error = as_request_error(cause)
            raise DataError(f"cannot read {source.where}: {error}.", hint=WITH_TOKENIZER) from None
        self.pool = TextPool()
        self.rust.no_truncation()
        self.rust.no_padding()
        self._config = source.config
        named = self.rust.token_to_id(self._special("eos_token") or "")
        ends = Fields(source.generation, str(model_dir / "generation_config.json")).ids("eos_token_id")
        self.eos_token_ids = frozenset(ends + as_ids(named))
        self._template = source.chat_template
        self._vision = vision

    def encode(self, text: str, *, enough: int | None = None, special: bool = True) -> list[int]:
        """Returns the token ids of a text. If `special` is True, the tokenizer's post-processor adds special tokens,
        such as a BOS.

        Raises UsageError for a text with half a surrogate pair. A long text is cut somewhere after its first `enough`
        tokens.
        """
        return self.encode_all([self._cut(_checked(text), enough)], plain=not special)[0]

    def encode_pair(self, text: str, pair: str, *, enough: int | None = None) -> list[int]:
        """Returns the token ids of two texts, joined as the tokenizer's post-processor joins a pair. Long texts are cut
        in the same way as by `encode`.
        """
        texts = self._cut(_checked(text), enough), self._cut(_checked(pair), enough)
        (encoding,) = self.rust.encode_batch_fast([texts], add_special_tokens=True)
        ids: list[int] = encoding.ids
        return ids

    def encode_all(self, texts: list[str], *, plain: bool = False) -> list[list[int]]:
        """Returns the token ids of each text, without special tokens if `plain` is True. The texts are always encoded
        as one batch, because the library releases Python's lock only for batches.
        """
        batch = self.rust.encode_batch_fast([_checked(text) for text in texts], add_special_tokens=not plain)
        return [encoding.ids for encoding in batch]

    def spell(self, text: str) -> list[int] | None:
        """Encodes `text` with ordinary tokens only, and returns their ids. A special token's name in `text` is encoded
        as plain text. Returns None if `text` contains no such name.
        """
        if not any(name in text for name in self._special_names):
            return None
        normalizer, splitter = self.rust.normalizer, self.rust.pre_tokenizer
        plain = normalizer.normalize_str(text) if normalizer is not None else text
        pieces = [piece for piece, _ in splitter.pre_tokenize_str(plain)] if splitter is not None else [plain]
        return [token.id for piece in pieces for token in self.rust.model.tokenize(piece)]

    @cached_property
    def _special_names(self) -> list[str]:
        return [token.content for token in self.rust.get_added_tokens_decoder().values() if token.special]

    @cached_property
    def first_token(self) -> int | None:
        """The token that a text follows if nothing else precedes it: the BOS or, in a model without one, the EOS."""
        keys = ("bos_token", "eos_token")
        named: list[int | None] = [self.rust.token_to_id(self._special(key) or "") for key in keys]
        return next((token for token in named if token is not None), min(self.eos_token_ids, default=None))

    async def encode_off_loop(
        self, text: str, pair: str | None = None, *, enough: int | None = None, special: bool = True
    ) -> list[int]:
        """Returns the token ids of a text, or of a pair of texts, without blocking the event loop. Long texts are
        encoded in a thread. If `special` is False, the post-processor adds no special tokens to a text.
        """

        def encode() -> list[int]:
            if pair is not None:
                return self.encode_pair(text, pair, enough=enough)
            return self.encode(text, enough=enough, special=special)

        if len(text) + len(pair or "") > _INLINE_CHARS:
            return await self.pool.run(encode)
        try:
            return encode()
        except RaytideError:
            raise
        except BaseException as error:
            raise EngineError(f"the tokenizer failed: {as_request_error(error)!r}.") from None

    def _cut(self, text: str, enough: int | None) -> str:
        """Returns a text cut somewhere after `enough` tokens. It counts the tokens slice by slice, since the tokens of
        a whole text take a hundred times its memory. A slice alone has only a few tokens more than as part of the text.
        """
        if enough is None or len(text) <= max(_SLICE_CHARS, 2 * enough):
            return text
        count = 0
        for start in range(0, len(text), _SLICE_CHARS):
            count += len(self.encode_all([text[start : start + _SLICE_CHARS]], plain=True)[0]) - _TORN_TOKENS
            if count > enough:
                return text[: start + _SLICE_CHARS]
        return text

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Returns the name that each of the tokens has in the vocabulary. The name of an unknown token is ""."""
        return [self.rust.id_to_token(token) or "" for token in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.rust.decode(list(ids), skip_special_tokens=True))

    @cached_property
    def chat_format(self) -> ChatFormat:
        """The format of the model's outputs, as far as the chat template reveals it."""
        return format_of(self._chat) if self._template else ChatFormat()

    def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        options: PromptOptions = PLAIN_PROMPT,
        *,
        enough: int | None = None,
    ) -> list[int]:
        """Returns the token ids of a conversation. A long conversation is cut in the same way as by `encode`. For a
        model without a chat template (a base model), the conversation becomes plain `role: content` lines.

        If a message contains the name of a special token, the name is encoded as text. Only the template writes special
        tokens, so that no message can forge a turn.
        """
        if not messages:
            raise UsageError("the conversation is empty.", hint="Send at least one message.")
        variables = checked_variables(options.template_kwargs)
        try:
            turns = self._turns(messages, tools)
            (turns, tools, variables), mark = self._break_names((turns, list(tools), variables))
        except RecursionError:
            raise UsageError(
                "the arguments of a call in the messages are nested too deeply.", hint="Leave the call out."
            ) from None
        starts_answer = options.ending == "answer"

        def rendered(turns: list[dict[str, object]]) -> str:
            if self._vision is not None:
                turns = self._show_images(turns, self._vision.image_token)
            if self._template:
                return self._chat.render(turns, prompt=starts_answer, tools=tools, variables=variables)
            lines = "".join(f"{turn['role']}: {turn['content']}\n" for turn in turns)
            return lines + "assistant:" if starts_answer else lines

        text = left_open(rendered, turns, messages[-1]) if options.ending == "open" else rendered(turns)
        whole, plain = _checked(text), bool(self._template)
        text = self._cut(whole, enough)
        ids = self._encode_without(mark, text, plain) if mark else self.encode_all([text], plain=plain)[0]
        count = sum(part is None for message in messages for part in message.parts)
        if self._vision is None or len(text) < len(whole):
            return ids
        return _with_images(ids, self._vision, count)

    def _turns(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
        if not self._template:
            return turns_of(messages, tools, knows_tools=False)
        chat = self._chat
        if chat.knows_tools:
            one = any(len(message.tool_calls) > 1 for message in messages) and chat.takes_one_call
            return turns_of(messages, tools, knows_tools=True, takes_one_call=one, id_length=chat.id_length)
        return turns_of(messages, tools, knows_tools=False, takes_system=not tools or chat.takes_system)

    def _show_images(self, turns: list[dict[str, object]], image_token: int) -> list[dict[str, object]]:
        """Returns the turns with images in the form that the template reads: contents as lists of parts or, for a
        template that knows no parts, as texts with image tokens.
        """
        takes_parts = "type" in str(self._template)
        name = self.rust.id_to_token(image_token)

        def content(value: object) -> object:
            parts: list[dict[str, str]] = value if isinstance(value, list) else [{"type": "text", "text": str(value)}]
            if takes_parts:
                return parts
            return "".join(f"{name}\n" if part["type"] == "image" else part["text"] for part in parts)

        return [{**turn, "content": content(turn["content"])} for turn in turns]

    def _break_names(self, value: T) -> tuple[T, str]:
        """Returns the JSON-like value with a mark inserted into each special token's name in its texts, so that the
        name no longer matches, and the mark. The mark is a Unicode non-character that does not occur in the texts; ""
        if no name occurs.
        """
        names, mark = spelled_names(value, self._special_names)
        return (with_marks(value, names, mark), mark) if names else (value, "")

    def _encode_without(self, mark: str, text: str, plain: bool) -> list[int]:
        """Returns the token ids of a marked text, leaving out the tokens of its marks."""
        (encoding,) = self.rust.encode_batch([text], add_special_tokens=not plain)
        ids = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if mark not in text[start:end]:
                ids.append(token)
            elif end - start > 1:
                raise UsageError(
                    "a message has the name of a special token, which this model's tokenizer cannot read as text.",
                    hint="Leave it out.",
                )
        return ids

    @cached_property
    def _chat(self) -> ChatTemplate:
        specials = {key: self._special(key) or "" for key in ("bos_token", "eos_token")}
        return ChatTemplate(str(self._template), specials)

    def _special(self, key: str) -> str | None:
        """Returns a special token, which tokenizer_config.json gives as a string or as an object with `content`; None
        without one.
        """
        value = self._config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) else None


def _with_images(ids: list[int], vision: VisionSpec, count: int) -> list[int]:
    """Returns the prompt with each image token repeated as often as an image has vectors. Raises UsageError if the
    template left an image out.
    """
    found = ids.count(vision.image_token)
    if found != count:
        raise UsageError(f"the chat template shows {found} of {count} images.", hint="Put each into a user's message.")
    if not count:
        return ids
    return [each for token in ids for each in [token] * (vision.num_tokens if token == vision.image_token else 1)]


def _checked(text: str) -> str:
    """Returns the text if it is valid UTF-8. Raises UsageError otherwise."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the text has half a surrogate pair, {text[error.start]!a} at character {error.start}.",
            hint="Send text that is valid Unicode.",
        ) from None
    return text
