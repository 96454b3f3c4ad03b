"""Who asks: a token names a user and a team."""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass
from pathlib import Path

from raytide.core.errors import AuthError, DeniedError

ANY_TEAM = "*"


@dataclass(frozen=True, slots=True)
class Caller:
    user: str
    team: str
    """`*` may act for every team."""

    @property
    def home(self) -> str:
        """Whose it is what names no team."""
        return "default" if self.team == ANY_TEAM else self.team

    def sees(self, team: str) -> bool:
        return self.team in (ANY_TEAM, team)

    def require_team(self, team: str) -> None:
        if not self.sees(team):
            raise DeniedError(
                f"the token of {self.user} is for team {self.team}, not {team}.", hint=f"Use a token of team {team}."
            )

    def require_all(self) -> None:
        if self.team != ANY_TEAM:
            what = f"the token of {self.user} is for team {self.team}; this takes one for every team."
            raise DeniedError(what, hint="Ask whoever runs the cluster.")


class Tokens:
    """`tokens.json`: {token: {"user": ..., "team": ...}}, read again when it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_ns = -1
        self._callers: dict[str, Caller] = {}

    def caller(self, authorization: str | None) -> Caller:
        """The caller behind an Authorization header; AuthError when it names nobody."""
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() == "bearer" and given:
            for token, caller in self._load().items():
                if hmac.compare_digest(token.encode(), given.strip().encode()):
                    return caller
        raise AuthError(
            "no valid API token was sent.", hint="Send `Authorization: Bearer TOKEN`; client.json has yours."
        )

    def _load(self) -> dict[str, Caller]:
        changed_ns = self._path.stat().st_mtime_ns
        if changed_ns != self._read_ns:
            raw = json.loads(self._path.read_text())
            self._callers = {token: Caller(who["user"], who["team"]) for token, who in raw.items()}
            self._read_ns = changed_ns
        return self._callers
