"""Splits a model's output into reasoning, text and tool calls while the output is generated.

Text that may be the beginning of a marker is held back until it is certain what the text is. A call whose name cannot
be read is returned as text, as the model wrote it. Arguments that arrive after the name are passed on as they are, even
if their JSON is broken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from uuid import uuid4

from raytide.actors.serving.tools.json_scanner import JsonScanner
from raytide.actors.serving.tools.tagged import TaggedArguments, call_in, length_held, overlap

_HEAD = re.compile(
    r'_\{_"name"_:_("(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]){0,999}")_,_"(?:arguments|parameters)"_:_(?=[^\s"])'.replace(
        "_", r"\s{0,99}"
    )
)
"""The beginning of a call as an object, up to arguments that are no string. Every name that matches is valid JSON. The
length is limited, because the beginning is searched again with each piece of the output."""
_ARGUMENTS = ("arguments", "parameters")
_THINK, _END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """The syntax in which a model writes a tool call: `begin`, the body of the call, `end`.

    `body` is one of these forms:

    - `object`: an object with the tool's name and the arguments.
    - `array`: an array of such objects.
    - `named`: the tool's name, `separator`, and the arguments.
    - `arguments`: only the arguments; the tool is `name`.
    - `tagged`: the tool's name and each argument in tags of their own. `begin` may be missing before known tools.

    `begin` may be a special token, and special tokens do not appear in the text. For that reason, an output that
    begins with one of the texts in `starts` counts as a call, even without `begin`.
    """

    body: Literal["object", "array", "named", "arguments", "tagged"]
    begin: str = ""
    end: str = ""
    separator: str = ""
    starts: tuple[str, ...] = ()
    name: str = ""

    @property
    def ends(self) -> tuple[str, ...]:
        """The texts that may follow the body of a call and are part of the call's syntax."""
        fence = ("```", *_GROUP_MARKERS) if self.body == "named" else ()
        return (*((self.end,) if self.end else ()), *fence)


_SYNTAXES = {
    "hermes": ToolSyntax("object", "<tool_call>", "</tool_call>"),
    "llama3": ToolSyntax("object", "<|python_tag|>", ";", starts=("{",)),
    "mistral": ToolSyntax("array", "[TOOL_CALLS]", starts=("[{",)),
    "deepseek": ToolSyntax(
        "named", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "\n```json\n"
    ),
    "qwen3_coder": ToolSyntax("tagged", "<tool_call>", "</tool_call>"),
}
_GROUP_MARKERS = tuple(
    f"<｜tool▁{what}▁{end}｜>" for what in ("calls", "outputs", "output") for end in ("begin", "end")
)
"""The markers around a group of calls, which are neither text nor calls."""


def syntax_of(chat_format: str) -> ToolSyntax:
    """Returns the call syntax of a chat template's format. Returns Hermes's syntax for formats that have none of their
    own.
    """
    return _SYNTAXES.get(chat_format, _SYNTAXES["hermes"])


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a tool call. `index` is the call's number in the output. The first piece has `id` and `name`. Later
    pieces continue the arguments.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    text: str = ""
    reasoning: str = ""
    call: CallPiece | None = None


_NOTHING = Piece()


@dataclass(slots=True)
class OutputParser:
    """Parses one output. Call `feed` with text as it arrives, and `finish` at the end. Both return the new pieces that
    can no longer change.
    """

    tools: ToolSyntax | None = None
    """The syntax of calls; None if no tool may be called."""
    reasoning: Literal["", "tagged", "open"] = ""
    """`tagged` outputs may begin with reasoning between tags; `open` ones begin inside it."""
    max_calls: int | None = None
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The schema of each tool's arguments, which gives tagged arguments their types."""
    calls: int = 0
    _buffer: str = ""
    _state: Literal["start", "think", "text", "call", "rest", "after"] = "start"
    _scanner: JsonScanner | None = None
    _rest: JsonScanner | None = None
    _whole: JsonScanner | None = None
    _seen: int = 0
    """The number of characters of the buffer that `_whole` has read."""
    _raw: str = ""
    """The text of the call so far, which is returned as text if it turns out not to be a call."""
    _in_array: bool = False
    _name: str = ""
    _tagged: TaggedArguments | None = None
    _has_thought: bool = False
    _is_cut: bool = False
    _drops_tail: bool = False

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        return [piece for piece in self._steps(at_end=False) if piece != _NOTHING]

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Returns the last pieces. `is_cut` is true for an output that reached its length limit. Such an output may
        contain complete calls and end inside a further call. The incomplete call is then dropped, because clients would
        read its text as part of the answer.
        """
        self._is_cut, self._drops_tail = is_cut, is_cut and self.calls > 0
        return [piece for piece in self._steps(at_end=True) if piece != _NOTHING]

    def _steps(self, *, at_end: bool) -> Iterator[Piece]:
        while True:
            before = (self._state, len(self._buffer), self._scanner is None, self._in_array, self.calls)
            match self._state:
                case "start":
                    yield from self._start(at_end)
                case "think":
                    yield from self._think(at_end)
                case "text":
                    yield from self._text(at_end)
                case "call":
                    yield from self._call(at_end)
                case "rest":
                    self._drop_rest()
                case "after":
                    self._after(at_end)
            if (self._state, len(self._buffer), self._scanner is None, self._in_array, self.calls) == before:
                return

    def _start(self, at_end: bool) -> Iterator[Piece]:
        yield from ()
        if self.reasoning == "open":
            self._state = "think"
            return
        if self._has_thought:
            self._buffer = self._buffer.lstrip("\n")
        held = self._buffer.lstrip()
        openings = [_THINK] if self.reasoning == "tagged" else []
        openings += self.tools.starts if self.tools is not None else ()
        if not at_end and (
            (self._has_thought and not held)
            or any(opening.startswith(held) and opening != held for opening in openings)
        ):
            return  # also before any text
        if self.reasoning == "tagged" and held.startswith(_THINK):
            self._buffer, self._state = held[len(_THINK) :], "think"
        elif self.tools is not None and (self.tools.body == "arguments" or held.startswith(self.tools.starts)):
            self._begin_call()
        else:
            self._state = "text"

    def _think(self, at_end: bool) -> Iterator[Piece]:
        inside, tag, rest = self._buffer.partition(_END_THINK)
        if tag:
            self._buffer, self._state, self.reasoning, self._has_thought = rest, "start", "", True
            if inside:
                yield Piece(reasoning=inside)
            return
        keep = 0 if at_end else overlap(inside, _END_THINK)
        self._buffer = inside[len(inside) - keep :]
        if text := inside[: len(inside) - keep]:
            yield Piece(reasoning=text)

    def _text(self, at_end: bool) -> Iterator[Piece]:
        if self.tools is None or not self.tools.begin:
            text, self._buffer = self._buffer, ""
        else:
            text, marker, rest = self._next_call(self.tools)
            if marker:
                self._buffer = rest
                self._begin_call()
                text = _without_noise(text).rstrip() if self.calls == 0 else ""
            else:
                keep = 0 if at_end and not self._drops_tail else self._held(self.tools, text)
                certain = text[: len(text) - keep]
                keep += 0 if at_end else len(certain) - len(certain.rstrip())
                text, self._buffer = text[: len(text) - keep], text[len(text) - keep :]
                text = _without_noise(text)
                if self.calls:
                    text = text.strip() if at_end or not text.strip() else text
        if text and self._may_say_more():
            yield Piece(text=text)

    def _next_call(self, tools: ToolSyntax) -> tuple[str, str, str]:
        """Returns the text before the next call, the text that begins the call, and the rest."""
        if tools.body != "tagged":
            return self._buffer.partition(tools.begin)
        if (found := call_in(self._buffer, self.schemas)) is None:
            return self._buffer, "", ""
        self._name = found[2].strip()
        return self._buffer[: found.start()], found[0], self._buffer[found.end() :]

    def _held(self, tools: ToolSyntax, text: str) -> int:
        """Returns the length of the end of `text` that may be the beginning of a marker."""
        if tools.body == "tagged":
            return length_held(text)
        markers = (tools.begin, *(_GROUP_MARKERS if tools.body == "named" else ()))
        return max(overlap(text, marker) for marker in markers)

    def _may_say_more(self) -> bool:
        """Returns whether more text may be sent. Text after the last allowed call belongs to dropped calls."""
        return self.max_calls is None or self.calls < self.max_calls or self._state != "text"

    def _begin_call(self) -> None:
        assert self.tools is not None
        self._state, self._raw, self._scanner, self._whole = "call", "", None, None
        self._in_array = self.tools.body == "array"

    def _call(self, at_end: bool) -> Iterator[Piece]:
        assert self.tools is not None
        if self._scanner is not None:
            yield from self._arguments(at_end)
            return
        if self._tagged is not None:
            yield from self._tagged_arguments(self._tagged, at_end)
            return
        if self._in_array:
            rest = self._buffer.lstrip(" \n\t,[")
            if "[" in self._buffer[: len(self._buffer) - len(rest)]:
                self._raw = "["  # text, if what the array contains is no call
            self._buffer = rest
            if self._buffer.startswith("]"):
                self._buffer, self._state = self._buffer[1:], "text"
                return
        if self.tools.body == "arguments":
            yield self._open(self.tools.name)
        elif self.tools.body == "tagged":
            yield self._open(self._name)
            self._scanner, self._tagged = None, TaggedArguments(self.schemas.get(self._name, {}))
        elif self.tools.body == "named":
            name, separator, rest = self._buffer.partition(self.tools.separator)
            if separator:
                self._raw, self._buffer = self._raw + name + separator, rest
                yield self._open(name.strip())
            elif at_end:
                yield from self._give_up()
        elif head := _HEAD.match(self._buffer):
            self._raw, self._buffer = self._raw + head[0], self._buffer[head.end() :]
            yield self._open(json.loads(head[1]))
        else:
            yield from self._whole_object(at_end)

    def _open(self, name: str) -> Piece:
        self._scanner, self._whole = JsonScanner(), None
        piece = Piece(call=CallPiece(self.calls, f"call_{uuid4().hex[:24]}", name))
        self.calls += 1
        return piece if self._is_allowed() else _NOTHING

    def _is_allowed(self) -> bool:
        return self.max_calls is None or self.calls <= self.max_calls

    def _arguments(self, at_end: bool) -> Iterator[Piece]:
        """Yields the call's arguments as they arrive, without the text that closes the call."""
        assert self.tools is not None
        assert self._scanner is not None
        taken = self._scanner.feed(self._buffer)
        arguments, self._buffer = self._buffer[:taken], self._buffer[taken:]
        if arguments and self._is_allowed():
            yield Piece(call=CallPiece(self.calls - 1, arguments=arguments))
        if not self._scanner.is_complete:
            return
        self._scanner = None
        if self.tools.body in ("object", "array"):
            self._rest = JsonScanner.inside(until=self.tools.end[:1])
            self._state = "rest"
        else:
            self._after_call()

    def _tagged_arguments(self, tagged: TaggedArguments, at_end: bool) -> Iterator[Piece]:
        arguments, taken = tagged.feed(self._buffer, is_end=at_end and not self._is_cut)
        self._buffer = self._buffer[taken:]
        if arguments and self._is_allowed():
            yield Piece(call=CallPiece(self.calls - 1, arguments=arguments))
        if tagged.is_complete:
            self._tagged = None
            self._after_call()

    def _drop_rest(self) -> None:
        """Drops the fields that follow the arguments in a call's object."""
        assert self._rest is not None
        self._buffer = self._buffer[self._rest.feed(self._buffer) :]
        if self._rest.is_complete:
            self._state = "call"
            self._after_call()

    def _after_call(self) -> None:
        self._raw = ""
        if not self._in_array:
            self._state = "after"

    def _after(self, at_end: bool) -> None:
        """Drops the text that closes the call, and checks whether another call follows."""
        assert self.tools is not None
        self._buffer = self._buffer.lstrip()
        if end := next((each for each in self.tools.ends if self._buffer.startswith(each)), None):
            self._buffer = self._buffer[len(end) :]
        elif any(each.startswith(self._buffer) for each in self.tools.ends):
            if at_end:  # the output was cut inside the text that closes the call
                self._buffer, self._state = "", "text"
            return
        elif self.tools.starts and self._buffer.startswith(self.tools.starts):
            self._begin_call()
        else:
            self._state = "text"

    def _whole_object(self, at_end: bool) -> Iterator[Piece]:
        """Yields a call with fields in an unusual order, once its object is complete."""
        assert self.tools is not None
        if self._whole is None:
            self._whole, self._seen = JsonScanner(), 0
        taken = self._seen = self._seen + self._whole.feed(self._buffer[self._seen :])
        if not self._whole.is_complete:
            if at_end:
                yield from self._give_up()
            return
        text, self._buffer = self._buffer[:taken], self._buffer[taken:]
        try:
            found = json.loads(text)
            name = str(found["name"]).encode().decode()  # it may have half a surrogate pair
            arguments = next(found[key] for key in _ARGUMENTS if key in found)
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        except (ValueError, KeyError, TypeError, StopIteration, RecursionError):
            yield from self._give_up(text)
            return
        first, self._scanner = self._open(name), None
        if first.call is not None:
            yield Piece(call=replace(first.call, arguments=written.encode(errors="backslashreplace").decode()))
        self._after_call()

    def _give_up(self, taken: str | None = None) -> Iterator[Piece]:
        """Yields a call that cannot be read as text: up to `taken`, or the whole rest of the output if it is None."""
        assert self.tools is not None
        begin = self.tools.begin if (self.calls or not self.tools.starts) and not self._in_array else ""
        text = begin + self._raw + (self._buffer if taken is None else taken)
        self._buffer, self._raw = "" if taken is None else self._buffer, ""
        self._state, self._in_array, self._scanner = "text", False, None
        if text and not self._drops_tail and self._may_say_more():
            yield Piece(text=text)


def _without_noise(text: str) -> str:
    for marker in _GROUP_MARKERS if "｜" in text else ():
        text = text.replace(marker, "")
    return text
