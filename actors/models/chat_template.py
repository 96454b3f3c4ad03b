"""Renders a model's chat template: jinja2 in a sandbox, as in transformers.

Supports `{% generation %}` blocks, with which a template marks the assistant's answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, TypeVar

from raytide.core.errors import ConfigError, UsageError

T = TypeVar("T")

Turn = Mapping[str, object]
"""A message: `role`, `content`, and other fields that the template uses."""

MOST_TEMPLATE_CHARS = 256 << 10
_BEGIN, _END = "\ufdd0", "\ufdd1"  # Unicode noncharacters
MARKS = tuple(map(chr, range(0xFDD2, 0xFDF0)))
"""The other noncharacters, which mark names of special tokens that messages spell out."""


class ChatTemplate:
    def __init__(self, source: str, specials: Mapping[str, str]) -> None:
        """`specials` are the tokens that templates use: `bos_token`, `eos_token`."""
        self._compiled, self._specials = _compile(source), dict(specials)
        self.source = source

    @cached_property
    def knows_tools(self) -> bool:
        """True if the template uses the variable `tools`. Such a template shows tools to the model, and renders tool
        calls and their results. Phi-4-mini's template reads only a field of this name in a message.
        """
        from jinja2 import meta

        return "tools" in meta.find_undeclared_variables(self._compiled.environment.parse(self.source))

    @cached_property
    def takes_system(self) -> bool:
        """True if the template shows a system message. Gemma's and Mistral's first templates refuse it."""
        turns = [{"role": "system", "content": _BEGIN}, {"role": "user", "content": "x"}]
        return _BEGIN in (self._tried(turns) or "")

    @cached_property
    def takes_one_call(self) -> bool:
        """True if the template refuses an answer with several tool calls, as those of Llama 3.1 to 3.3 do."""
        id = "a" * (self.id_length or 9)
        call = {"id": id, "type": "function", "function": {"name": "f", "arguments": {}}}
        result = {"role": "tool", "tool_call_id": id, "name": "f", "content": "x"}

        def refuses(count: int) -> bool:
            answer = {"role": "assistant", "content": "", "tool_calls": [call] * count}
            return self._tried([{"role": "user", "content": "x"}, answer, *[result] * count]) is None

        return refuses(2) and not refuses(1)

    def _tried(self, turns: Sequence[Turn]) -> str | None:
        """Returns the rendered conversation, or None if the template refuses it."""
        try:
            return self._marked(turns, True)
        except UsageError:
            return None

    @cached_property
    def id_length(self) -> int | None:
        """The number of letters and digits of which the template wants the ids of tool calls to be made, as Mistral's
        templates do; None if it takes any id.
        """
        found = re.search(r"\bid\s*\|\s*length\s*!=\s*([1-9][0-9]?)\b", self.source)
        return None if found is None else int(found[1])

    def render(
        self,
        turns: Sequence[Turn],
        *,
        prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the conversation as text. If `prompt` is true, the text ends with the start of an answer. `variables`
        are more variables for the template, such as `enable_thinking`. Raises UsageError if the template refuses the
        conversation.
        """
        return self._marked(turns, prompt, tools, variables or {}).replace(_BEGIN, "").replace(_END, "")

    def answers(
        self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of the whole conversation, and the character ranges of the assistant's answers in it."""
        turns, tools = map_texts([[*turns], [*tools]], lambda text: text.replace(_BEGIN, "").replace(_END, ""))
        marked = self._marked(turns, False, tools)
        return _unmark(marked) if _BEGIN in marked else self._by_prefix(turns, tools, marked)

    def _by_prefix(
        self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], text: str
    ) -> tuple[str, list[tuple[int, int]]]:
        """Finds each answer as the difference between the conversation up to it and its prompt. It includes the end
        mark, as in serving.
        """
        ranges = []
        for index, turn in enumerate(turns):
            if turn.get("role") != "assistant":
                continue
            before, after = self._marked(turns[:index], True, tools), self._marked(turns[: index + 1], False, tools)
            if not (after.startswith(before) and text.startswith(after)):
                raise UsageError(
                    f"the chat template renders turn {index + 1} differently when other turns follow, so it cannot be "
                    "trained on as it would be generated.",
                    hint="Mark the answers with {% generation %} in your own template (chat.template), or use "
                    "conversations with one answer.",
                )
            ranges.append((len(before), len(after)))
        return text, ranges

    def _marked(
        self,
        turns: Sequence[Turn],
        prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        from jinja2.exceptions import TemplateError

        own = {"messages": turns, "add_generation_prompt": prompt, "tools": list(tools) or None}
        try:
            return str(self._compiled.render({**(variables or {}), **own, **self._specials}))
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise UsageError(
                f"the model's chat template refused the messages: {error}.",
                hint="Check the roles, and chat_template_kwargs if there are any.",
            ) from None


def _compile(source: str) -> Any:
    try:
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ConfigError("this model's chat template needs jinja2.", hint="Run pip install jinja2.") from None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    if len(source) > MOST_TEMPLATE_CHARS:
        raise ConfigError(f"the chat template has {len(source)} characters.", hint=f"At most {MOST_TEMPLATE_CHARS}.")
    try:
        return environment.from_string(source)
    except (TemplateError, SyntaxError, RecursionError, MemoryError) as error:  # Python's parser refuses deep nesting
        raise ConfigError(f"the chat template is not valid jinja2: {error}.", hint="Fix the template.") from None


def _generation() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    return Generation


def map_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """Returns a JSON value with `change` applied to each text, including the keys of objects."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): map_texts(each, change) for key, each in value.items()}
    return type(value)(map_texts(each, change) for each in value) if isinstance(value, list | tuple) else value


def spelled_names(value: object, names: Sequence[str]) -> tuple[list[str], str]:
    """Returns those of the names that occur in the texts of a JSON-like value, and a mark that occurs in none of the
    texts; the mark is "" if no name occurs. Raises UsageError if all marks occur. A mark inside a name makes the
    tokenizer read the name as text, so that no message forges a turn.
    """
    texts: list[str] = []
    map_texts(value, texts.append)
    # Few prefixes for hundreds of names: a long text is searched a few times only.
    starts = {start for start in {name[:4] for name in names} if any(start in text for text in texts)}
    found = [name for name in names if name[:4] in starts and any(name in text for text in texts)]
    if not found:
        return [], ""
    mark = next((char for char in MARKS if not any(char in text for text in texts)), "")
    if not mark:
        raise UsageError("the messages hold every non-character of Unicode.", hint="Leave them out.")
    return found, mark


def with_marks(value: T, names: Sequence[str], mark: str) -> T:
    """Returns the value with the mark behind the first character of each of the names in its texts."""

    def marked(text: str) -> str:
        for name in names:
            text = text.replace(name, f"{name[0]}{mark}{name[1:]}")
        return text

    changed: T = map_texts(value, marked)
    return changed


def _unmark(marked: str) -> tuple[str, list[tuple[int, int]]]:
    text, ranges = "", []
    for at, piece in enumerate(marked.split(_BEGIN)):
        inside, _, rest = piece.partition(_END) if at else ("", "", piece)
        if at:
            ranges.append((len(text), len(text) + len(inside)))
        text += inside + rest
    return text, ranges


def _to_json(
    value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Returns JSON for a template, with the options and the order of them that transformers has."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005  a template tells the model the date where it runs


def _refuse(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)
