"""Authentication of requests. A token stands for a user and a team. A job's token stands for its job as well."""

from __future__ import annotations

import hmac
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from anyio import CapacityLimiter, to_thread

from raytide.control.job_tokens import job_named_by
from raytide.core.errors import AuthError, ClusterError, DeniedError
from raytide.core.objects.job import FINAL_STATES, Job
from raytide.core.state import Store

_log = logging.getLogger(__name__)

ANY_TEAM = "*"
GATEWAY_ROUTES = "/v1/gateway/"
GATEWAY_ROLE = "gateway"
ALERTS_ROUTE = "/v1/alerts/webhook"
ALERTMANAGER_ROLE = "alertmanager"
_THREADS = 8


@dataclass(frozen=True, slots=True)
class Caller:
    user: str
    team: str
    """The caller's team; `*` allows all teams."""
    job: str = ""
    """The job of a job token; empty for a user's token."""
    is_gateway: bool = False
    """True for the gateway's own token, which opens its routes and nothing else."""
    is_alertmanager: bool = False
    """True for Alertmanager's token, which opens its webhook and nothing else."""

    @property
    def name(self) -> str:
        """The caller's name in the audit log."""
        return f"{self.user}/{self.job}" if self.job else self.user

    @property
    def home(self) -> str:
        """The team to which this caller's specs belong if they name no team."""
        return "default" if self.team == ANY_TEAM else self.team

    @property
    def only_team(self) -> str | None:
        """The only team whose records the caller may see. None means all teams."""
        return None if self.team == ANY_TEAM else self.team

    def sees(self, team: str) -> bool:
        return self.team in (ANY_TEAM, team)

    def require_team(self, team: str) -> None:
        if not self.sees(team):
            raise DeniedError(
                f"the token of {self.user} is for team {self.team}, not {team}.", hint=f"Use a token of team {team}."
            )

    def acting_on(self, job: Job) -> Job:
        """Returns the job if this caller may change it, else raises DeniedError. A job token may change only jobs of
        its own user.
        """
        self.require_team(job.spec.team)
        if self.job and job.user != self.user:
            raise DeniedError(
                f"the token of {self.job} is for jobs of {self.user}; {job.id} belongs to {job.user}.",
                hint="Use a user's token for this.",
            )
        return job

    def require_person(self) -> Caller:
        """Returns this caller. Raises DeniedError for a job token."""
        if self.job:
            raise DeniedError(
                f"the token of {self.job} is a job token; this needs a user's token.", hint="Use a token of yours."
            )
        return self

    def require_route(self, path: str) -> None:
        """Raises DeniedError if this caller may not use the path.

        The gateway may use only the gateway's routes, and no other caller may use these. Alertmanager may use only its
        webhook.
        """
        if self.is_alertmanager and path != ALERTS_ROUTE:
            raise DeniedError(f"the token of {self.user} opens only {ALERTS_ROUTE}.", hint="Use raytide's client.")
        if path.startswith(GATEWAY_ROUTES) is not self.is_gateway:
            whose = "other routes than its own" if self.is_gateway else "the gateway's routes"
            raise DeniedError(f"the token of {self.user} does not open {whose}.", hint="Use raytide's client.")

    def require_all(self) -> None:
        if self.team != ANY_TEAM:
            what = f"the token of {self.user} is for team {self.team}; this needs one for all teams."
            raise DeniedError(what, hint="Ask the cluster's operator.")


@dataclass(frozen=True, slots=True)
class JobTokens:
    """Authenticates the tokens of unfinished jobs."""

    key: bytes
    store: Store

    def caller(self, job_id: str) -> Caller:
        """Returns the caller of a job's token: the job's user and team. Raises AuthError if the job is over."""
        if (owner := self.store.census.job_owner(job_id)) is None:
            raise AuthError(f"{job_id}, the job of this token, does not exist.", hint="Submit the job again.")
        user, team, state = owner
        if state in FINAL_STATES:
            raise AuthError(f"{job_id} is {state}, so its token is no longer valid.", hint="Submit the job again.")
        return Caller(user, team, job=job_id)


class Tokens:
    """Authenticates the tokens of jobs, and the tokens in `tokens.json`.

    `tokens.json` has the tokens of users ({token: {"user": ..., "team": ...}}), of the gateway and of Alertmanager. The
    file is read again when it changes. While it is missing or invalid, the tokens that were read last stay valid.
    """

    def __init__(self, path: Path, jobs: JobTokens | None = None) -> None:
        self._path, self._jobs = path, jobs
        self._threads = CapacityLimiter(_THREADS)
        self._seen: tuple[int, ...] | None = None
        self._callers: dict[str, Caller] | None = None
        self._problem = ""

    async def caller(self, authorization: str | None) -> Caller:
        """Returns the caller that an Authorization header authenticates.

        Raises AuthError if the token is not valid, and ClusterError if `tokens.json` has never been readable. Only a
        job's token is checked against the store. For other tokens, the store is not read.
        """
        scheme, _, given = (authorization or "").partition(" ")
        given = given.strip()
        if scheme.lower() == "bearer" and given:
            if self._jobs is not None and (job_id := job_named_by(given, self._jobs.key)) is not None:
                return await to_thread.run_sync(self._jobs.caller, job_id, limiter=self._threads)
            for token, caller in self._load().items():
                if hmac.compare_digest(token.encode(), given.encode()):
                    return caller
        raise AuthError(
            "no valid API token was sent.", hint="Send `Authorization: Bearer TOKEN`; client.json contains yours."
        )

    def _load(self) -> dict[str, Caller]:
        """Returns the callers by token; a changed file is read again. Raises ClusterError if it was never readable."""
        try:
            about = self._path.stat()
            seen = (about.st_mtime_ns, about.st_size, about.st_ino)
            if seen != self._seen:
                self._callers = _callers(json.loads(self._path.read_text()))
                self._seen, self._problem = seen, ""
        except (OSError, ValueError, RecursionError) as error:
            if self._problem != (problem := f"{type(error).__name__}: {error}"):
                self._problem = problem
                _log.error("cannot read %s, so the tokens read last stay valid: %s", self._path, problem)
        if self._callers is None:
            raise ClusterError("the API cannot read its tokens.", hint="The operator must fix tokens.json.")
        return self._callers


def _callers(raw: object) -> dict[str, Caller]:
    """Returns the callers by token. Raises ValueError if an entry names neither a user and a team nor a role."""
    if not isinstance(raw, dict):
        raise ValueError("it is not a mapping")
    callers = {}
    for token, entry in raw.items():
        if token and entry == {"role": GATEWAY_ROLE}:
            callers[token] = Caller(GATEWAY_ROLE, "", is_gateway=True)
            continue
        if token and entry == {"role": ALERTMANAGER_ROLE}:
            callers[token] = Caller(ALERTMANAGER_ROLE, ANY_TEAM, is_alertmanager=True)
            continue
        user, team = (entry.get("user"), entry.get("team")) if isinstance(entry, dict) else ("", "")
        if not (token and isinstance(user, str) and user and isinstance(team, str) and team):
            raise ValueError('an entry is not "TOKEN": {"user": ..., "team": ...}')
        callers[token] = Caller(user, team)
    return callers
