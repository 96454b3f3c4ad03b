"""Text to token ids and back: tokenizer.json by the `tokenizers` library, special ids and chat template from its
companions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from raytide.actors.engine.core import Message
from raytide.actors.models.chat_template import ChatTemplate
from raytide.actors.models.model_config import as_ids, read_json
from raytide.core.errors import DataError, UsageError

__all__ = ["Tokenizer"]

_INLINE_CHARS = 2000


class Tokenizer:
    """A model directory's tokenizer."""

    def __init__(self, model_dir: Path) -> None:
        path = model_dir / "tokenizer.json"
        try:
            self.rust = RustTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"cannot read {path}: {error}.", hint="Export the model with its tokenizer.json.") from None
        self.rust.no_truncation()
        self.rust.no_padding()
        self._config = _optional_json(model_dir / "tokenizer_config.json")
        generation = _optional_json(model_dir / "generation_config.json")
        named = self.rust.token_to_id(self._special("eos_token") or "")
        self.eos_token_ids = frozenset(as_ids(generation.get("eos_token_id")) + as_ids(named))
        template = model_dir / "chat_template.jinja"
        self._template = template.read_text() if template.exists() else self._config.get("chat_template")

    def encode(self, text: str) -> list[int]:
        """Token ids with the special tokens that the tokenizer's own post-processor adds (a BOS, if it has one)."""
        ids: list[int] = self.rust.encode(text).ids
        return ids

    async def encode_off_loop(self, text: str) -> list[int]:
        """As `encode`; a long text in a thread, so that the event loop goes on."""
        return self.encode(text) if len(text) <= _INLINE_CHARS else await asyncio.to_thread(self.encode, text)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of the text alone."""
        ids: list[int] = self.rust.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.rust.decode(list(ids), skip_special_tokens=True))

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """A conversation's token ids. A model without a chat template (a base model) gets plain `role: content`
        lines.
        """
        if not messages:
            raise UsageError("the conversation is empty.", hint="Send at least one message.")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        if not self._template:
            return self.encode("".join(f"{turn['role']}: {turn['content']}\n" for turn in turns) + "assistant:")
        return self.encode_plain(self._chat.render(turns, prompt=True))

    @cached_property
    def _chat(self) -> ChatTemplate:
        specials = {key: self._special(key) or "" for key in ("bos_token", "eos_token")}
        return ChatTemplate(str(self._template), specials)

    def _special(self, key: str) -> str | None:
        """A special token is a string in tokenizer_config.json, or an object that has it as its content."""
        value = self._config.get(key)
        return value.get("content") if isinstance(value, dict) else value


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
