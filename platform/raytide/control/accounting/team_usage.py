"""Adds teams, their resource usage and their spending to the Snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from raytide.control.views import TeamUse
from raytide.core.objects.cluster_config import ClusterConfig
from raytide.core.objects.job import Job
from raytide.core.objects.ledger_entry import Spent
from raytide.core.objects.snapshot import Snapshot
from raytide.core.objects.team import Team, TeamSpec, decayed_usage, overlaid
from raytide.core.state.records import StoredTeam
from raytide.queue.admission.scheduler import admission_state

_EVERY_S = 30.0
"""The interval of storing a team's recent usage, in seconds."""


def limits(config: ClusterConfig, stored: Iterable[StoredTeam]) -> dict[str, TeamSpec]:
    """Returns the configured teams with the limits that were set at run time. A team's parent is always the configured
    one, because a stored parent could form a cycle.
    """
    given = {team.name: team.given for team in stored if team.given}
    return {
        name: overlaid(spec, given[name]) if name in given else spec for name, spec in config.settings.teams.items()
    }


def with_team_usage(
    snapshot: Snapshot, config: ClusterConfig, stored: Iterable[StoredTeam], spent: Spent, old_s: float = 0.0
) -> Snapshot:
    """Returns the snapshot with teams, priority classes and spending. Also sets the snapshot's `old_s`, the greatest
    age in seconds that any job has reached.
    """
    teams = {team.name: team for team in stored}
    return replace(
        snapshot,
        teams=tuple(
            Team(
                name=name,
                spec=spec,
                recent_gpu_s=recent_gpu_s(teams.get(name), snapshot.at_s),
                spent_micro_usd=spent.teams_month.get(name, 0),
            )
            for name, spec in sorted(limits(config, teams.values()).items())
        ),
        classes=config.settings.priorities,
        spent=spent.jobs,
        spent_month={
            job.id: spent.jobs_month.get(job.id, 0) for job in snapshot.jobs if job.spec.budget_per == "month"
        },
        old_s=old_s,
    )


def recent_gpu_s(stored: StoredTeam | None, now_s: float) -> float:
    return 0.0 if stored is None else decayed_usage(stored.recent_gpu_s, now_s - stored.recent_at_s)


def recent_usage(stored: Iterable[StoredTeam], jobs: Iterable[Job], now_s: float) -> tuple[StoredTeam, ...]:
    """Returns new values of the teams' recent usage, for those teams whose stored value is due for an update.

    The new value is the stored value after decay, plus the GPU-seconds of the team's jobs since the value was
    stored.
    """
    teams = {team.name: team for team in stored}
    holds: Counter[str] = Counter()
    for job in jobs:
        holds[job.spec.team] += job.spell_gpus  # type: ignore[assignment]  # a Counter of floats
    found = []
    for name in sorted(teams.keys() | holds.keys()):
        team = teams.get(name, StoredTeam(name, recent_at_s=now_s - _EVERY_S))
        since_s = now_s - team.recent_at_s
        if since_s >= _EVERY_S and (holds[name] or team.recent_gpu_s):
            # A controller that was down does not know what was held meanwhile.
            recent = recent_gpu_s(team, now_s) + holds[name] * min(since_s, 2 * _EVERY_S)
            found.append(replace(team, recent_gpu_s=recent, recent_at_s=now_s))
    return tuple(found)


def team_usage(snapshot: Snapshot) -> dict[str, TeamUse]:
    state = admission_state(snapshot)
    names = sorted(state.quotas.limited)
    return {
        team.name: TeamUse(
            used={name: state.quotas.held(team.name, name) for name in names},
            own={name: state.quotas.subtree_quota(team.name, name) for name in names},
            available={name: max(0.0, state.quotas.available(team.name, name)) for name in names},
            committed_micro_usd=state.budgets.committed[team.name],
            recent_gpu_h=team.recent_gpu_s / 3600.0,
        )
        for team in snapshot.teams
    }
