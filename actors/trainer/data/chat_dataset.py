"""Chat datasets. Sequence i is conversation i, rendered by the model's chat template.

Lines are checked when the file is opened. They are tokenized when a step needs them, so that a rank keeps no text in
memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from raytide.actors.models.chat_template import ChatTemplate, Turn
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


class ChatDataset:
    """A TokenDataset of conversations. Each conversation is truncated or padded to `seq_len` + 1 tokens."""

    def __init__(self, chat: ChatSpec, tokenizer: Path, seq_len: int) -> None:
        self.name, self.seq_len = chat.file, seq_len
        self._file = _staged(chat.file)
        self._lines = _index(self._file, _version(self._file.stat()), chat.file)
        self.n_sequences = len(self._lines.starts)
        self.tokenizer_file = tokenizer / "tokenizer.json"
        self._config = _optional(tokenizer / CONFIG)
        self.template = {} if chat.template is None else {TEMPLATE: Path(chat.template)}
        self.files: Mapping[str, Path] = tokenizer_files(tokenizer)
        source = self._template(tokenizer)
        self._chat = ChatTemplate(source, {key: self._special(key) for key in ("bos_token", "eos_token")})
        parts = (
            self._lines.digest,
            source,
            str(self._config),
            hashlib.sha256(read_bytes(self.tokenizer_file, _CHECK)).hexdigest(),
        )
        self.digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        self._tokens(0)  # fail early if the template cannot mark the answers

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
        number, turns = self._lines.read(self._file, index)
        try:
            text, answers = self._chat.answers(turns)
        except UsageError as error:
            raise DataError(f"{self.name}, line {number}: {error}", hint=error.hint) from None
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        ids = np.asarray(encoded.ids[: self.seq_len + 1], np.int64)
        begins = np.asarray([begin for begin, _ in encoded.offsets[: self.seq_len + 1]], np.int64)
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


class _Lines:
    """The file offset and line number of each conversation."""

    def __init__(self, file: Path, name: str) -> None:
        self.name = name
        digest, at, self.starts, self.numbers = hashlib.sha256(), 0, list[int](), list[int]()
        with open(file, "rb", opener=safe_opener) as body:
            self.version = _version(os.fstat(body.fileno()))
            for number, line in enumerate(body, 1):
                digest.update(line)
                if line.strip():
                    _turns(line, f"{name}, line {number}")
                    self.starts.append(at)
                    self.numbers.append(number)
                at += len(line)
        if not self.starts:
            raise DataError(f"{name} holds no conversation.", hint="Write one JSON object to a line.")
        self.digest = digest.hexdigest()

    def read(self, file: Path, index: int) -> tuple[int, list[Turn]]:
        with open(file, "rb", opener=safe_opener) as body:
            if _version(os.fstat(body.fileno())) != self.version:
                raise DataError(
                    f"{self.name} was changed during training.", hint="Restore the file, or start a new run."
                )
            body.seek(self.starts[index])
            return self.numbers[index], _turns(body.readline(), str(file))


def _version(about: os.stat_result) -> tuple[int, int, int]:
    return about.st_mtime_ns, about.st_size, about.st_ino


@lru_cache(maxsize=2)
def _index(file: Path, version: tuple[int, int, int], name: str) -> _Lines:
    """Returns the index of the file's lines. It is cached, because a gang that forms again opens the same file."""
    return _Lines(file, name)


def _turns(line: bytes, where: str) -> list[Turn]:
    try:
        body = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}.", hint="Write one conversation to a line.") from None
    turns = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where} has no messages.", hint='Write {"messages": [{"role": ..., "content": ...}]}.')
    for place, turn in enumerate(turns, 1):
        good = isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        if not good:
            raise DataError(f"{where}: message {place} lacks a role or content.", hint="Both are strings.")
    if all(turn["role"] != "assistant" for turn in turns):
        raise DataError(f"{where} has no assistant message to train on.", hint="Remove the line.")
    if b"\\u" in line and _has_half_a_pair(turns):  # only an escape can be one
        raise DataError(f"{where} has half a surrogate pair, which is no text.", hint="Write whole characters.")
    return turns


def _has_half_a_pair(turns: list[Turn]) -> bool:
    try:
        json.dumps(turns, ensure_ascii=False).encode()
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
