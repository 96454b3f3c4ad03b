"""Stored responses, which clients can read later and continue."""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

Item = dict[str, Any]

RESPONSE_ID = re.compile(r"resp_[\w-]{1,100}", re.ASCII)
_ITEM_ID = re.compile(r"[a-z]{2,4}_([\w-]{1,100})_\d{1,9}", re.ASCII)
MAX_REFERRED = 256
"""The most stored responses whose items one request names by their ids."""
MAX_RESPONSE_BYTES = 4 << 20
"""The largest size in bytes of a response, including its input, that is stored."""
KEEP_S = 30 * 86_400
"""The seconds for which a response is stored, as at OpenAI."""
PASSED_ON = "raytide.passed_on"
"""The key of the ASGI scope with the PassedOn of a request, for an API of somebody else that answers it."""
_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


@dataclass(frozen=True, slots=True)
class ResponseOwner:
    """The owner of a response: the team, and the account of the key with which the response was requested. The account
    is empty if there was no key.
    """

    team: str
    account: str


@dataclass(frozen=True, slots=True)
class PassedOn:
    """The parts of a request that an API of somebody else does not know.

    `input` is the whole input if the request names a stored response, or items of one; else None. `keep` stores the
    answer. It is None if the answer is not to be stored.
    """

    input: list[Item] | None
    keep: Callable[[Item], Awaitable[None]] | None


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as clients see it, with the input items of its prompt. The items of earlier responses in the same
    conversation are included.
    """

    id: str
    model: str
    response: Item
    input: list[Item]

    @property
    def conversation(self) -> list[Item]:
        """The input and output items of the conversation up to this response. The prompt of a later response that
        continues the conversation begins with these items.
        """
        return [*self.input, *self.response["output"]]

    def to_json(self) -> str:
        fields = {"id": self.id, "model": self.model, "response": self.response, "input": self.input}
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> StoredResponse:
        return cls(**json.loads(text))


class ResponseStore(Protocol):
    """Keeps responses for a limited time. A store has a size limit. Above the limit, the oldest responses are
    removed.
    """

    async def add(self, owner: ResponseOwner, stored: StoredResponse) -> None:
        """Stores a response, unless it is too large."""

    async def get(self, team: str, response_id: str) -> StoredResponse | None:
        """Returns a response of the team. Returns None if the response is unknown, has expired or belongs to another
        team.
        """

    async def delete(self, team: str, response_id: str) -> bool:
        """Deletes a response of the team. Returns False if the team has no such response."""


class MemoryResponses:
    """A ResponseStore in this process's memory, for a server without a gateway."""

    def __init__(
        self, *, max_responses: int = 1000, max_bytes: int = 64 << 20, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._kept: OrderedDict[tuple[str, str], tuple[float, str]] = OrderedDict()
        self._max_responses, self._max_bytes, self._now_s = max_responses, max_bytes, now_s
        self._bytes = 0

    async def add(self, owner: ResponseOwner, stored: StoredResponse) -> None:
        text = stored.to_json()
        if len(text) > MAX_RESPONSE_BYTES:
            return
        self._kept[owner.team, stored.id] = self._now_s() + KEEP_S, text
        self._bytes += len(text)
        while len(self._kept) > self._max_responses or self._bytes > self._max_bytes:
            self._remove(next(iter(self._kept)))

    async def get(self, team: str, response_id: str) -> StoredResponse | None:
        expires_s, text = self._kept.get((team, response_id), (0.0, ""))
        if not text or expires_s < self._now_s():
            return None
        return StoredResponse.from_json(text)

    async def delete(self, team: str, response_id: str) -> bool:
        if await self.get(team, response_id) is None:
            return False
        self._remove((team, response_id))
        return True

    def _remove(self, key: tuple[str, str]) -> None:
        self._bytes -= len(self._kept.pop(key)[1])


def item_id(prefix: str, response_id: str, place: int) -> str:
    """Returns the id of item number `place` of a response's output, by which `response_of` finds the response."""
    return f"{prefix}_{response_id.removeprefix('resp_')}_{place}"


def response_of(id: object) -> str:
    """Returns the id of the response that an item belongs to; empty for an id that `item_id` did not make."""
    found = _ITEM_ID.fullmatch(id) if isinstance(id, str) else None
    return "" if found is None else f"resp_{found[1]}"


def input_items(given: str | Sequence[Item]) -> list[Item]:
    """Returns a request's input as a list of items, as the API shows them to clients. Each item has a type and an id,
    and the content of messages is a list of parts.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item(each) for each in given]


def foreign_items(given: str | Sequence[Item]) -> list[Item]:
    """Returns the items of a conversation for an API that has not stored them. Such an API looks up ids that it is
    sent, and reasoning only by its id.
    """
    return [
        {name: value for name, value in item.items() if name != "id"}
        for item in input_items(given)
        if item["type"] != "reasoning"
    ]


def _item(item: Item) -> Item:
    kind, own = item.get("type", "message"), item.get("id")
    prefix = _PREFIXES.get(kind, "msg") if isinstance(kind, str) else "msg"  # what it is else is refused later
    is_id = isinstance(own, str) and own
    named = {"type": kind, "id": own if is_id else f"{prefix}_{uuid4().hex[:24]}"}
    if kind == "reasoning":
        return {"summary": [], **item, **named}
    if kind == "message":
        content = item.get("content")
        if isinstance(content, str):
            is_output = item.get("role") == "assistant"
            part: Item = {"type": "output_text" if is_output else "input_text", "text": content}
            named["content"] = [part | {"annotations": []} if is_output else part]
    return {"status": "completed", **item, **named}
