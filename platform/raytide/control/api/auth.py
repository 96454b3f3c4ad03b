"""Who asks: a token names a user and a team, and a job's own token names that job too."""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass
from pathlib import Path

from raytide.control.job_tokens import PREFIX, job_named_by
from raytide.core.errors import AuthError, DeniedError, NotFoundError
from raytide.core.job import Job
from raytide.core.state import Store

ANY_TEAM = "*"


@dataclass(frozen=True, slots=True)
class Caller:
    user: str
    team: str
    """`*` may act for every team."""
    job: str = ""
    """The job whose own token was sent; empty for a user's token."""

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

    def require_owner(self, job: Job) -> None:
        """A job's own token changes only its user's jobs: itself, and what that user or the job itself submitted."""
        if self.job and job.user != self.user:
            raise DeniedError(
                f"the token of {self.job} is for jobs of {self.user}; {job.id} is {job.user}'s.",
                hint="Use the token of a user for this.",
            )

    def require_user(self) -> None:
        if self.job:
            raise DeniedError(f"the token of {self.job} is a job's; this takes a user's.", hint="Use a token of yours.")

    def require_all(self) -> None:
        if self.team != ANY_TEAM:
            what = f"the token of {self.user} is for team {self.team}; this takes one for every team."
            raise DeniedError(what, hint="Ask whoever runs the cluster.")


@dataclass(frozen=True, slots=True)
class JobTokens:
    """Tokens that jobs have for as long as they are not over."""

    key: bytes
    store: Store

    def caller(self, token: str) -> Caller | None:
        """The job's user and team. AuthError when the job is over; None when no job of this cluster has the token."""
        job_id = job_named_by(token, self.key)
        if job_id is None:
            return None
        try:
            job = self.store.job(job_id)
        except NotFoundError:
            return None
        if job.is_final:
            raise AuthError(f"{job_id} is {job.state}, and its token ended with it.", hint="Submit the job again.")
        return Caller(job.user, job.spec.team, job=job_id)


class Tokens:
    """`tokens.json`: {token: {"user": ..., "team": ...}}, read again when it changes; and the tokens of jobs."""

    def __init__(self, path: Path, jobs: JobTokens | None = None) -> None:
        self._path, self._jobs = path, jobs
        self._read_ns = -1
        self._callers: dict[str, Caller] = {}

    def caller(self, authorization: str | None) -> Caller:
        """The caller behind an Authorization header; AuthError when it names nobody."""
        scheme, _, given = (authorization or "").partition(" ")
        given = given.strip()
        if scheme.lower() == "bearer" and given:
            if self._jobs is not None and given.startswith(PREFIX) and (job := self._jobs.caller(given)) is not None:
                return job
            for token, caller in self._load().items():
                if hmac.compare_digest(token.encode(), given.encode()):
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
