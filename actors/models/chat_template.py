"""A model's chat template: conversations to text, by jinja2 in a sandbox, as transformers renders them.

`{% generation %}` blocks, with which a template marks what the assistant says, are understood.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from raytide.core.errors import ConfigError, UsageError

__all__ = ["ChatTemplate", "Turn"]

Turn = Mapping[str, object]
"""`role`, `content`, and whatever else the template knows."""

_BEGIN, _END = "\ufdd0", "\ufdd1"  # Unicode's non-characters: no text has them


class ChatTemplate:
    def __init__(self, source: str, specials: Mapping[str, str]) -> None:
        """`specials` are the tokens that templates name: `bos_token`, `eos_token`."""
        self._compiled, self._specials = _compile(source), dict(specials)

    def render(self, turns: Sequence[Turn], *, prompt: bool) -> str:
        """`prompt` ends it with what the assistant's answer follows. UsageError where the template refuses."""
        return self._marked(turns, prompt).replace(_BEGIN, "").replace(_END, "")

    def answers(self, turns: Sequence[Turn]) -> tuple[str, list[tuple[int, int]]]:
        """The whole conversation, and the ranges of characters in it that the assistant has to say."""
        marked = self._marked(turns, prompt=False)
        return _unmark(marked) if _BEGIN in marked else self._by_prefix(turns, marked)

    def _by_prefix(self, turns: Sequence[Turn], text: str) -> tuple[str, list[tuple[int, int]]]:
        """An answer is what a conversation has more than its prompt: with the mark that ends it, as it is served."""
        ranges = []
        for index, turn in enumerate(turns):
            if turn.get("role") != "assistant":
                continue
            before, after = self._marked(turns[:index], True), self._marked(turns[: index + 1], False)
            if not (after.startswith(before) and text.startswith(after)):
                raise UsageError(
                    f"the chat template writes turn {index + 1} otherwise when other turns follow, so it cannot be "
                    "learnt as it would be asked.",
                    hint="Mark the answers with {% generation %} in a template of your own (chat.template), or let "
                    "conversations have one answer.",
                )
            ranges.append((len(before), len(after)))
        return text, ranges

    def _marked(self, turns: Sequence[Turn], prompt: bool) -> str:
        from jinja2.exceptions import TemplateError

        try:
            return str(self._compiled.render(messages=turns, add_generation_prompt=prompt, **self._specials))
        except TemplateError as error:
            raise UsageError(
                f"the model's chat template refused the messages: {error}.", hint="Check the roles."
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
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ConfigError(f"the chat template is no jinja2: {error}.", hint="Correct the template.") from None


def _generation() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    return Generation


def _unmark(marked: str) -> tuple[str, list[tuple[int, int]]]:
    text, ranges = "", []
    for at, piece in enumerate(marked.split(_BEGIN)):
        inside, _, rest = piece.partition(_END) if at else ("", "", piece)
        if at:
            ranges.append((len(text), len(text) + len(inside)))
        text += inside + rest
    return text, ranges


def _refuse(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)
