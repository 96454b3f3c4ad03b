"""Shares a limited number of places among teams, without a queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from raytide.actors.serving.openai_api.errors import RETRY_AFTER_S, overloaded


class TeamPlaces:
    """Places for requests of teams. A team may have as many as it leaves free. So one team alone gets half of the
    places, and another team always finds some. Use it from one event loop.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[str] = Counter()

    @contextmanager
    def held(self, team: str) -> Iterator[None]:
        """Opens a context in which the team has a place. Raises ApiError (429) if the team has too many places."""
        if self._held[team] >= self._most - self._held.total():
            raise overloaded(f"{self._held[team]} requests of your team are running. Retry in {RETRY_AFTER_S} s.")
        self._held[team] += 1
        try:
            yield
        finally:
            self._held[team] -= 1
