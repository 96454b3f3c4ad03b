"""Finds the end of a JSON value in text that arrives piece by piece."""

from __future__ import annotations


class JsonScanner:
    """Finds the end of one JSON value while its text arrives.

    An object, an array or a string ends with its closing character. Any other value ends before the first character
    that cannot belong to it.
    """

    def __init__(self, until: str = "") -> None:
        self._depth, self._kind, self._until = 0, "", until
        self._in_string = self._is_escaped = False
        self.is_complete = False

    @classmethod
    def inside(cls, until: str) -> JsonScanner:
        """Returns a scanner inside an object. `until` outside strings also ends it, as models forget the last brace."""
        scanner = cls(until)
        scanner._depth, scanner._kind = 1, "nested"
        return scanner

    def feed(self, text: str) -> int:
        """Returns the number of characters at the start of `text` that belong to the value. If the value ends before
        the end of `text`, the number is smaller than the length of `text`.
        """
        for at, char in enumerate(text):
            if self.is_complete:
                return at
            if not self._kind and not char.isspace():
                self._kind = "nested" if char in "{[" else "string" if char == '"' else "plain"
            if self._in_string:
                self._string(char)
            elif char == '"' and self._kind != "plain":
                self._in_string = True
            elif char == self._until or (self._kind == "plain" and (char in ",]}" or char.isspace())):
                self.is_complete = True
                return at
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                self.is_complete = self._depth <= 0
        return len(text)

    def _string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
            self.is_complete = self._depth == 0
