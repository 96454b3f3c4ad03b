"""Chat datasets. Sequence i is conversation i, rendered by the model's chat template.

Lines are checked when the file is opened, and the first ones rendered, so that a template's refusal costs no training.
Lines are tokenized when a step needs them, so that a rank keeps no text in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raytide.actors.models.chat_template import MARKS, ChatTemplate, Turn, spelled_names, with_marks
from raytide.actors.models.model_config import as_ids, read_bytes, read_json, read_text
from raytide.actors.models.tokenizer_files import chat_template, tokenizer_files
from raytide.actors.trainer.data.local_copy import local_file_copy
from raytide.actors.trainer.data.order.shuffle import Ids
from raytide.actors.trainer.model.loss import IGNORE
from raytide.core.errors import ConfigError, DataError, RaytideError, UsageError
from raytide.core.io.private_paths import safe_opener
from raytide.core.io.token_dataset import CONFIG
from raytide.core.specs.model import ChatSpec

TEMPLATE = "chat_template.jinja"
_CHECK = "Check chat.tokenizer and chat.template."
_RENDERED = 10_000
"""The number of conversations that are rendered when the file is opened. Templates may be slow."""


class ChatDataset:
    """A TokenDataset of conversations. Each conversation is truncated or padded to `seq_len` + 1 tokens."""

    def __init__(self, chat: ChatSpec, tokenizer: Path, seq_len: int) -> None:
        self.name, self.seq_len = chat.file, seq_len
        self._file = _staged(chat.file)
        self.tokenizer_file = tokenizer / "tokenizer.json"
        self._config = _optional(tokenizer / CONFIG)
        self.template = {} if chat.template is None else {TEMPLATE: Path(chat.template)}
        self.files: Mapping[str, Path] = tokenizer_files(tokenizer)
        source = self._template(tokenizer)
        specials = tuple((key, self._special(key)) for key in ("bos_token", "eos_token"))
        self._chat = ChatTemplate(source, dict(specials))
        self._lines = _index(self._file, _version(self._file.stat()), chat.file, source, specials)
        self.n_sequences = len(self._lines.starts)
        parts = (
            self._lines.digest,
            source,
            str(self._config),
            hashlib.sha256(read_bytes(self.tokenizer_file, _CHECK)).hexdigest(),
        )
        self.digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        self._tokens(0)  # fail early if the tokenizer cannot be used

    @cached_property
    def vocab_size(self) -> int:
        ids: list[int] = list(self._tokenizer.get_vocab(with_added_tokens=True).values())
        return 1 + max(ids)

    @property
    def eos_id(self) -> int:
        generation = _optional(self.tokenizer_file.parent / "generation_config.json")
        named = self._tokenizer.token_to_id(self._special("eos_token"))
        ids = as_ids(named) or as_ids(generation.get("eos_token_id"))
        if not ids:
            raise DataError(f"{self.tokenizer_file} has no end-of-text token.", hint=f"Set eos_token in {CONFIG}.")
        return ids[0]

    def examples(self, ids: Ids) -> tuple[Ids, Ids]:
        inputs, targets = np.zeros((len(ids), self.seq_len), np.int64), np.full((len(ids), self.seq_len), IGNORE)
        for row, index in enumerate(ids):
            tokens, learnt = self._tokens(int(index))
            count = len(tokens) - 1
            inputs[row, :count] = tokens[:-1]
            targets[row, :count] = np.where(learnt[1:], tokens[1:], IGNORE)
        return inputs, targets

    def _tokens(self, index: int) -> tuple[Ids, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Returns up to `seq_len` + 1 tokens, and a mask of those that begin inside an assistant's answer."""
        number, talk = self._lines.read(self._file, index)
        try:
            talk, mark = _without_names(talk, *self._special_names)
        except UsageError as error:
            raise DataError(f"{self.name}, line {number}: {error}", hint=error.hint) from None
        text, answers = _answers(self._chat, talk, f"{self.name}, line {number}")
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        if mark and any(end - begin > 1 and mark in text[begin:end] for begin, end in encoded.offsets):
            raise DataError(
                f"{self.name}, line {number} names a special token, which this tokenizer cannot read as text.",
                hint="Remove the line.",
            )
        found = [
            (token, begin)
            for token, (begin, end) in zip(encoded.ids, encoded.offsets, strict=True)
            if not mark or mark not in text[begin:end]
        ][: self.seq_len + 1]
        ids = np.asarray([token for token, _ in found], np.int64)
        begins = np.asarray([begin for _, begin in found], np.int64)
        learnt = np.zeros(len(ids), np.bool_)
        for first, end in answers:
            learnt |= (begins >= first) & (begins < end)
        if len(ids) < 2:
            raise DataError(
                f"{self.name}, line {number}: there is nothing to train on.", hint="Check the chat template."
            )
        return ids, learnt

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_buffer(read_bytes(self.tokenizer_file, _CHECK))
        except RaytideError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"cannot read {self.tokenizer_file}: {error}.", hint="Give its directory.") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def _special_names(self) -> tuple[list[str], list[str]]:
        """The names of all special tokens, and of those that the template writes around turns of text."""
        names = [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]
        written = (self._special("bos_token"), self._special("eos_token"))
        user, answer = {"role": "user", "content": MARKS[0]}, {"role": "assistant", "content": "x"}
        others = [{"role": role, "content": MARKS[0]} for role in ("system", "tool", "observation")]
        around = ""
        for turns in ([user, answer, user], *([first, user, answer] for first in others)):
            with suppress(UsageError):  # the template may refuse a role
                around += self._chat.render(turns, prompt=False)
        around = around if MARKS[0] in around else self._chat.source
        return names, [name for name in names if name in written or name in around]

    def _template(self, tokenizer: Path) -> str:
        given = self.template.get(TEMPLATE)
        if given is not None:
            return read_text(given, _CHECK)
        source = chat_template(tokenizer, self._config)
        if source is None:
            raise ConfigError(f"{tokenizer} has no chat template.", hint="Give a jinja2 file as chat.template.")
        return source

    def _special(self, key: str) -> str:
        """Returns a special token, which tokenizer_config.json stores as a string or as an object with its content."""
        value = self._config.get(key)
        return str((value.get("content") if isinstance(value, dict) else value) or "")


class _Talk(NamedTuple):
    """A conversation: its turns, and the tools that the model may call in it."""

    turns: list[Turn]
    tools: list[Mapping[str, Any]]


class _Lines:
    """The file offset and line number of each conversation."""

    def __init__(self, file: Path, name: str, chat: ChatTemplate) -> None:
        self.name = name
        digest, at, self.starts, self.numbers = hashlib.sha256(), 0, list[int](), list[int]()
        with open(file, "rb", opener=safe_opener) as body:
            self.version = _version(os.fstat(body.fileno()))
            for number, line in enumerate(body, 1):
                digest.update(line)
                if line.strip():
                    talk = _talk(line, f"{name}, line {number}")
                    if len(self.starts) < _RENDERED:
                        _answers(chat, talk, f"{name}, line {number}")
                    self.starts.append(at)
                    self.numbers.append(number)
                at += len(line)
        if not self.starts:
            raise DataError(f"{name} holds no conversation.", hint="Write one JSON object to a line.")
        self.digest = digest.hexdigest()

    def read(self, file: Path, index: int) -> tuple[int, _Talk]:
        with open(file, "rb", opener=safe_opener) as body:
            if _version(os.fstat(body.fileno())) != self.version:
                raise DataError(
                    f"{self.name} was changed during training.", hint="Restore the file, or start a new run."
                )
            body.seek(self.starts[index])
            return self.numbers[index], _talk(body.readline(), str(file))


def _version(about: os.stat_result) -> tuple[int, int, int]:
    return about.st_mtime_ns, about.st_size, about.st_ino


@lru_cache(maxsize=2)
def _index(
    file: Path, version: tuple[int, int, int], name: str, template: str, specials: tuple[tuple[str, str], ...]
) -> _Lines:
    """Returns the index of the file's lines. It is cached, because a gang that forms again opens the same file."""
    return _Lines(file, name, ChatTemplate(template, dict(specials)))


def _answers(chat: ChatTemplate, talk: _Talk, where: str) -> tuple[str, list[tuple[int, int]]]:
    """Returns a conversation's text and the ranges of its answers. Raises DataError if the template cannot show it."""
    has_calls = any(turn.get("tool_calls") for turn in talk.turns)
    if not chat.knows_tools and (talk.tools or (has_calls and "tool_calls" not in chat.source)):
        raise DataError(
            f"{where} has tools, which the chat template does not show.",
            hint="Give a template that shows tools (chat.template), or remove the line.",
        )
    try:
        return chat.answers(talk.turns, talk.tools)
    except UsageError as error:
        raise DataError(f"{where}: {error}", hint=error.hint) from None
    except RecursionError:
        raise DataError(f"{where} is nested too deeply.", hint="Remove the line.") from None


def _talk(line: bytes, where: str) -> _Talk:
    try:
        body = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}.", hint="Write one conversation to a line.") from None
    except RecursionError:
        raise DataError(f"{where} is nested too deeply.", hint="Remove the line.") from None
    turns = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where} has no messages.", hint='Write {"messages": [{"role": ..., "content": ...}]}.')
    tools = body.get("tools") or []
    if isinstance(tools, str):  # as exporters of flat columns write them
        with suppress(ValueError, RecursionError):
            tools = json.loads(tools) or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: tools is not a list of objects.", hint="Write tools as in a chat request.")
    turns = [_called(turn) for turn in turns]
    for place, turn in enumerate(turns, 1):
        good = isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        if not good:
            raise DataError(f"{where}: message {place} lacks a role or content.", hint="Both are strings.")
    if all(turn["role"] != "assistant" for turn in turns):
        raise DataError(f"{where} has no assistant message to train on.", hint="Remove the line.")
    if b"\\u" in line and _has_half_a_pair([turns, tools]):  # only an escape can be half
        raise DataError(f"{where} has half a surrogate pair, which is no text.", hint="Write whole characters.")
    return _Talk(turns, tools)


def _without_names(talk: _Talk, names: Sequence[str], own: Sequence[str]) -> tuple[_Talk, str]:
    """Returns the conversation with a mark in each special token's name that a message spells out, and the mark. Such a
    name is then encoded as text, as in serving, so that no message forges a turn. In answers, only the names in `own`,
    which the template writes, are marked: other special tokens there may be meant to learn. The mark is a
    noncharacter that no message contains; "" if no message contains such a name.
    """
    spelled, mark = spelled_names([talk.turns, talk.tools], names)
    if not spelled:
        return talk, ""
    turns = [with_marks(turn, own if turn["role"] == "assistant" else spelled, mark) for turn in talk.turns]
    return _Talk(turns, with_marks(talk.tools, spelled, mark)), mark


def _called(turn: Any) -> Any:
    """Returns a turn as a server passes it to the template: the arguments of tool calls are objects, and a turn with
    calls alone has empty content.
    """
    calls = turn.get("tool_calls") if isinstance(turn, dict) else None
    if not calls or not isinstance(calls, list):
        return turn
    content = turn.get("content")
    return {**turn, "content": "" if content is None else content, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        text = function["arguments"]
        return {**call, "function": {**function, "arguments": json.loads(text) if text.strip() else {}}}
    except (ValueError, RecursionError):
        return call


def _has_half_a_pair(body: object) -> bool:
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _staged(file: str) -> Path:
    """Returns the file's local path; a remote file is copied once per machine and version."""
    if "://" not in file:
        if not Path(file).is_file():
            raise DataError(f"{file} does not exist.", hint="Check chat.file.")
        return Path(file)
    from raytide.core.io.storage import exists, open_url

    if not exists(file):
        raise DataError(f"{file} does not exist.", hint="Check chat.file.")
    fs, path = open_url(file)
    return local_file_copy(file, hashlib.sha256(f"{file} {fs.ukey(path)}".encode()).hexdigest()[:32], ".jsonl")


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
