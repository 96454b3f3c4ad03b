"""What each team may hold now: its own quota, and what others of the tree leave unused. Pure but for its own tally.

The arithmetic is Kueue's. A team's subtree has its own quota and what its children lend up; what it keeps for itself
is guaranteed. Use beyond the guarantee counts at the parent, up to the root. What the fleet could hold beyond all
quotas is the root's, so that a quota for one team takes nothing from those without. A resource that no team names has
no limit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
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
    names: tuple[str, ...] = ()
    """The same, in order."""
    spare: dict[str, float] = field(default_factory=dict)
    """What the fleet could hold of each beyond all quotas."""
    subtree: dict[str, dict[str, float]] = field(default_factory=dict)
    shares: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    """By team and resource: its own, and what of that it does not lend."""
    beyond: dict[str, set[str]] = field(default_factory=dict)
    """By limited resource: the teams that hold more than their own of it."""
    named: set[tuple[str, str]] = field(default_factory=set)
    """Teams and resources for which a quota stands at the team or above it; else it lives off what is the root's."""
    used: Used = field(default_factory=lambda: _zeros())
    """At each team: what it holds, and what its children hold beyond what they keep for themselves."""
    fixed: Used = field(default_factory=lambda: _zeros())
    """What cannot be taken back, held by jobs that do not give way: of each team, and of those without a quota together
    at the root."""

    @classmethod
    def of(cls, teams: Iterable[Team], supply: Resources) -> Quotas:
        quotas = cls({team.name: team.spec for team in teams}, supply)
        names = quotas.limited = frozenset(name for spec in quotas.specs.values() for name in spec.quota)
        quotas.names = tuple(sorted(names))
        quotas.beyond = {name: set() for name in names}
        quotas.subtree[_ROOT] = dict.fromkeys(names, 0.0)
        children = defaultdict[str, list[str]](list)
        for team, spec in quotas.specs.items():
            children[spec.parent].append(team)
        for team in quotas.specs:
            quotas._sum(team, children)
            quotas.named |= {(team, name) for above in quotas.line(team) for name in quotas.specs[above].quota}
        for name in names:
            promised = sum(spec.quota.get(name, 0.0) for spec in quotas.specs.values())
            lent = sum(quotas._lent(team, name) for team, spec in quotas.specs.items() if not spec.parent)
            quotas.spare[name] = max(0.0, supply.get(name, 0.0) - promised)
            quotas.subtree[_ROOT][name] = lent + quotas.spare[name]
        return quotas

    def copy(self) -> Quotas:
        """A tally of its own."""
        used, fixed = _zeros(), _zeros()
        used.update((team, amounts.copy()) for team, amounts in self.used.items())
        fixed.update((team, amounts.copy()) for team, amounts in self.fixed.items())
        beyond = {name: set(teams) for name, teams in self.beyond.items()}
        return replace(self, used=used, fixed=fixed, beyond=beyond)

    def take(self, team: str, need: Resources, *, gives_way: bool = True) -> None:
        for name in self.names:
            if name in need:
                self._add(team, name, need[name])
                if not gives_way:
                    self.fixed[team if (team, name) in self.named else _ROOT][name] += need[name]

    def give(self, team: str, need: Resources) -> None:
        for name in self.names:
            if name in need:
                self._add(team, name, -need[name])

    def available(self, team: str, name: str) -> float:
        """How much more the team may hold."""
        if name not in self.limited:
            return math.inf
        (own, kept), used, spec = (
            self.shares.get((team, name), _NONE),
            self.used[team][name],
            self.specs.get(team, _ANY),
        )
        if spec.parent == _ROOT:
            above = self.subtree[_ROOT][name] - self.used[_ROOT][name]
        else:
            above = self.available(spec.parent, name)
        if (limit := spec.borrow.get(name)) is not None:
            above = min(above, own - kept - max(0.0, used - kept) + limit)
        return max(0.0, kept - used) + above

    def lacking(self, team: str, need: Resources, *, gives_way: bool = True, may_borrow: bool = True) -> str | None:
        """The first resource of which the team may not hold so much more. What cannot be taken back is not borrowed."""
        for name in self.names:
            if name not in need:
                continue
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
        if (team, name) in self.named:
            return self.own(team, name) - self.fixed[team][name]
        return self.spare[name] - self.fixed[_ROOT][name]

    def is_own(self, team: str, need: Resources) -> bool:
        """Whether the team would hold no more than its own with it."""
        return not any(
            name in need and (team, name) in self.named and need[name] > self.left_of_own(team, name) + _SLACK
            for name in self.names
        )

    def left_of_own(self, team: str, name: str) -> float:
        """How much more the team may hold without borrowing; what no team above it has a quota of is not borrowed."""
        return self.own(team, name) - self.used[team][name] if (team, name) in self.named else math.inf

    def may_take_back(self, team: str, need: Resources) -> bool:
        """Whether what it lacks is its own, lent to others, or what its place in the fleet is held by them."""
        return self.is_own(team, need) and any((team, name) in self.named for name in need)

    def borrows(self, team: str, names: Iterable[str]) -> bool:
        return any(team in self.beyond[name] for name in self.limited.intersection(names))

    def borrowing(self, names: Iterable[str]) -> set[str]:
        """The teams that hold more than their own of any of these."""
        return set[str]().union(*[self.beyond[name] for name in names if name in self.limited])

    def own(self, team: str, name: str) -> float:
        return self.subtree.get(team, {}).get(name, 0.0)

    def line(self, team: str) -> Iterator[str]:
        """The team and those above it."""
        while spec := self.specs.get(team):
            yield team
            team = spec.parent

    def _sum(self, team: str, children: Mapping[str, Iterable[str]]) -> dict[str, float]:
        if team not in self.subtree:
            spec = self.specs[team]
            own = {name: spec.quota.get(name, 0.0) for name in self.limited}
            for child in children.get(team, ()):
                self._sum(child, children)
                own = {name: amount + self._lent(child, name) for name, amount in own.items()}
            self.subtree[team] = own
            for name, amount in own.items():
                lent = spec.lend.get(name)
                self.shares[(team, name)] = amount, 0.0 if lent is None else max(0.0, amount - lent)
        return self.subtree[team]

    def _lent(self, team: str, name: str) -> float:
        own, kept = self.shares.get((team, name), _NONE)
        return own - kept

    def _add(self, team: str, name: str, amount: float) -> None:
        while amount:
            used, (own, kept) = self.used[team], self.shares.get((team, name), _NONE)
            before = used[name]
            after = used[name] = before + amount
            if team == _ROOT:
                return
            (self.beyond[name].add if after > own + _SLACK else self.beyond[name].discard)(team)
            amount = max(0.0, after - kept) - max(0.0, before - kept)
            team = self.specs.get(team, _ANY).parent


def _zeros() -> Used:
    return defaultdict(partial(defaultdict, float))


_ANY = TeamSpec()
_NONE = (0.0, 0.0)
