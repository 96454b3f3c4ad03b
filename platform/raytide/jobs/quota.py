"""What each team may hold now: its own quota, and what others of the tree leave unused. Pure but for its own tally.

The arithmetic is Kueue's. A team's subtree has its own quota and what its children lend up; what it keeps for itself
is guaranteed. Use beyond the guarantee counts at the parent, up to the root. What the fleet could hold beyond all
quotas is the root's, so that a quota for one team takes nothing from those without. A resource that no team names has
no limit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial

from raytide.core.fleet import Resources
from raytide.core.team import Team, TeamSpec

_ROOT = ""
_SLACK = 1e-6

Used = defaultdict[str, defaultdict[str, float]]


@dataclass(slots=True, eq=False)
class Quotas:
    specs: Mapping[str, TeamSpec]
    supply: Resources
    """What the fleet could hold at most."""
    limited: frozenset[str] = frozenset()
    """The resources that some team names."""
    spare: dict[str, float] = field(default_factory=dict)
    """What the fleet could hold of each beyond all quotas."""
    subtree: dict[str, dict[str, float]] = field(default_factory=dict)
    used: Used = field(default_factory=lambda: _zeros())
    """At each team: what it holds, and what its children hold beyond what they keep for themselves."""
    fixed: Used = field(default_factory=lambda: _zeros())
    """What cannot be taken back, held by jobs that do not give way: of each team, and of those without a quota together
    at the root."""

    @classmethod
    def of(cls, teams: Iterable[Team], supply: Resources) -> Quotas:
        quotas = cls({team.name: team.spec for team in teams}, supply)
        names = quotas.limited = frozenset(name for spec in quotas.specs.values() for name in spec.quota)
        quotas.subtree[_ROOT] = dict.fromkeys(names, 0.0)
        for team in quotas.specs:
            quotas._sum(team, names)
        for name in names:
            promised = sum(spec.quota.get(name, 0.0) for spec in quotas.specs.values())
            lent = sum(quotas._lent(team, name) for team, spec in quotas.specs.items() if not spec.parent)
            quotas.spare[name] = max(0.0, supply.get(name, 0.0) - promised)
            quotas.subtree[_ROOT][name] = lent + quotas.spare[name]
        return quotas

    def copy(self) -> Quotas:
        """A tally of its own."""
        return replace(self, used=deepcopy(self.used), fixed=deepcopy(self.fixed))

    def take(self, team: str, need: Resources, *, gives_way: bool = True) -> None:
        for name in self.limited & need.keys():
            self._add(team, name, need[name])
            if not gives_way:
                self.fixed[team if self._named(team, name) else _ROOT][name] += need[name]

    def give(self, team: str, need: Resources) -> None:
        for name in self.limited & need.keys():
            self._add(team, name, -need[name])

    def available(self, team: str, name: str) -> float:
        """How much more the team may hold."""
        if name not in self.limited:
            return math.inf
        if team == _ROOT:
            return self.subtree[_ROOT][name] - self.used[_ROOT][name]
        kept, used = self._kept(team, name), self.used[team][name]
        above = self.available(self._parent(team), name)
        if (limit := self._spec(team).borrow.get(name)) is not None:
            above = min(above, self._lent(team, name) - max(0.0, used - kept) + limit)
        return max(0.0, kept - used) + above

    def lacking(self, team: str, need: Resources, *, gives_way: bool = True, may_borrow: bool = True) -> str | None:
        """The first resource of which the team may not hold so much more. What cannot be taken back is not borrowed."""
        for name in sorted(self.limited & need.keys()):
            if need[name] > self.available(team, name) + _SLACK:
                return name
            if not gives_way and need[name] > self.never_taken_back(team, name) + _SLACK:
                return name
            if not may_borrow and not self.is_own(team, {name: need[name]}):
                return name
        return None

    def never_taken_back(self, team: str, name: str) -> float:
        """How much more of what nobody may ask for again the team may hold: its own, or without one what is spare."""
        if name not in self.limited:
            return math.inf
        if self._named(team, name):
            return self.own(team, name) - self.fixed[team][name]
        return self.spare[name] - self.fixed[_ROOT][name]

    def is_own(self, team: str, need: Resources) -> bool:
        """Whether the team would hold no more than its own with it."""
        return all(
            self.used[team][name] + need[name] <= self.own(team, name) + _SLACK
            for name in self.limited & need.keys()
            if self._named(team, name)
        )

    def left_of_own(self, team: str, name: str) -> float:
        """How much more the team may hold without borrowing; what no team above it has a quota of is not borrowed."""
        return self.own(team, name) - self.used[team][name] if self._named(team, name) else math.inf

    def may_take_back(self, team: str, need: Resources) -> bool:
        """Whether what it lacks is its own, lent to others, or what its place in the fleet is held by them."""
        return self.is_own(team, need) and any(self._named(team, name) for name in self.limited & need.keys())

    def borrows(self, team: str, names: Iterable[str]) -> bool:
        return bool(self.borrowing([team], names))

    def borrowing(self, teams: Iterable[str], names: Iterable[str]) -> set[str]:
        """Those of the teams that hold more than their own of any of these."""
        limited = self.limited.intersection(names)
        return {team for team in teams for name in limited if self.used[team][name] > self.own(team, name) + _SLACK}

    def own(self, team: str, name: str) -> float:
        return self.subtree.get(team, {}).get(name, 0.0)

    def _named(self, team: str, name: str) -> bool:
        """Whether a quota of this resource stands at the team or above it; else it lives off what is the root's."""
        while team:
            if name in self._spec(team).quota:
                return True
            team = self._parent(team)
        return False

    def _spec(self, team: str) -> TeamSpec:
        return self.specs.get(team, _ANY)

    def _parent(self, team: str) -> str:
        return self._spec(team).parent or _ROOT

    def _sum(self, team: str, names: Iterable[str]) -> dict[str, float]:
        if team not in self.subtree:
            own = {name: self.specs[team].quota.get(name, 0.0) for name in names}
            for child, spec in self.specs.items():
                if spec.parent == team:
                    self._sum(child, names)
                    own = {name: amount + self._lent(child, name) for name, amount in own.items()}
            self.subtree[team] = own
        return self.subtree[team]

    def _kept(self, team: str, name: str) -> float:
        limit = self._spec(team).lend.get(name)
        return 0.0 if limit is None else max(0.0, self.own(team, name) - limit)

    def _lent(self, team: str, name: str) -> float:
        return self.own(team, name) - self._kept(team, name)

    def _add(self, team: str, name: str, amount: float) -> None:
        kept, before = self._kept(team, name), self.used[team][name]
        after = self.used[team][name] = before + amount
        if team != _ROOT and (above := max(0.0, after - kept) - max(0.0, before - kept)):
            self._add(self._parent(team), name, above)


def _zeros() -> Used:
    return defaultdict(partial(defaultdict, float))


_ANY = TeamSpec()
