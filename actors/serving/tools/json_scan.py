"""Finds the end of a JSON value character by character, while its text is still being generated."""

from __future__ import annotations

__all__ = ["JsonScanner"]


class JsonScanner:
    """Finds the end of a JSON value while its text arrives.

    Follows the text of one JSON value. An object, an array or a string ends at its last character; any other value
    ends before the first character that cannot belong to it.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._kind = ""
        self._in_string = self._is_escaped = False
        self.is_complete = False

    @classmethod
    def inside(cls) -> JsonScanner:
        """Returns a scanner of what is left of an object that has begun."""
        scanner = cls()
        scanner._depth, scanner._kind = 1, "nested"
        return scanner

    def feed(self, text: str) -> int:
        """Returns how many characters of the text belong to the value; fewer than all once it is complete."""
        for at, char in enumerate(text):
            if self.is_complete:
                return at
            if not self._kind and not char.isspace():
                self._kind = "nested" if char in "{[" else "string" if char == '"' else "plain"
            if self._in_string:
                self._string(char)
            elif char == '"' and self._kind != "plain":
                self._in_string = True
            elif self._kind == "plain" and (char in ",]}" or char.isspace()):
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
