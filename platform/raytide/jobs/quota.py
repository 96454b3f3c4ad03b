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

from raytide.core.objects.node import Resources
from raytide.core.objects.team import Team, TeamSpec

_ROOT = ""
_SLACK = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class ResourceNode:
    """What holds for one team and one resource, whatever is used. Its tally stands in `Quotas` under its number."""

    number: int
    team: str
    name: str
    """Of the resource."""
    subtree_quota: float
    """Its quota, with what its children lend."""
    local_quota: float
    """What of that it does not lend."""
    borrow: float | None
    """How much it may borrow at most; None: all there is."""
    is_named: bool
    """A quota stands at the team or above it; else it lives off what is the root's."""
    above: ResourceNode | None
    """Of the team above it; None at the root."""


@dataclass(slots=True, eq=False)
class Quotas:
    specs: Mapping[str, TeamSpec]
    supply: Resources
    """What the fleet could hold at most."""
    limited: frozenset[str] = frozenset()
    """The resources that some team names."""
    names: tuple[str, ...] = ()
    """The same, in order."""
    unassigned: dict[str, float] = field(default_factory=dict)
    """What the fleet could hold of each beyond all quotas."""
    borrowers: dict[str, set[str]] = field(default_factory=dict)
    """By limited resource: the teams that hold more than their own of it."""
    _nodes: dict[str, dict[str, ResourceNode]] = field(default_factory=dict)
    """By limited resource and team."""
    _used: list[float] = field(default_factory=list)
    """By account: what the team holds, and what its children hold beyond what they keep for themselves."""
    _nonpreemptible: list[float] = field(default_factory=list)
    """By account: what jobs hold that do not give way, so that it cannot be taken back; without a quota at the root."""
    _borrowing: dict[tuple[str, ...], frozenset[str]] = field(default_factory=dict)
    """What `borrowing` said since that last changed."""

    @classmethod
    def of(cls, teams: Iterable[Team], supply: Resources) -> Quotas:
        specs = {team.name: team.spec for team in teams}
        limited = frozenset(name for spec in specs.values() for name in spec.quota)
        quotas = cls(specs, supply, limited, tuple(sorted(limited)))
        for name in quotas.names:
            quotas._open_all(name)
        return quotas

    def copy(self) -> Quotas:
        """A tally of its own."""
        return replace(
            self,
            borrowers={name: set(teams) for name, teams in self.borrowers.items()},
            _nodes={name: accounts.copy() for name, accounts in self._nodes.items()},
            _used=self._used.copy(),
            _nonpreemptible=self._nonpreemptible.copy(),
            _borrowing={},
        )

    def reserve(self, team: str, need: Resources, *, is_preemptible: bool = True) -> None:
        for name in self.names:
            if name in need:
                self._add(account := self._node(team, name), need[name])
                if not is_preemptible:
                    fixed_at = account if account.is_named else self._node(_ROOT, name)
                    self._nonpreemptible[fixed_at.number] += need[name]

    def release(self, team: str, need: Resources) -> None:
        for name in self.names:
            if name in need:
                self._add(self._node(team, name), -need[name])

    def held(self, team: str, name: str) -> float:
        """By it, and by its children beyond what they keep for themselves."""
        return self._used[self._node(team, name).number] if name in self.limited else 0.0

    def available(self, team: str, name: str) -> float:
        """How much more the team may hold."""
        return self._left(self._node(team, name)) if name in self.limited else math.inf

    def lacking(
        self, team: str, need: Resources, *, is_preemptible: bool = True, may_borrow: bool = True
    ) -> str | None:
        """The first resource of which the team may not hold so much more. What cannot be taken back is not borrowed."""
        for name in self.names:
            if name not in need:
                continue
            if need[name] > self._left(self._node(team, name)) + _SLACK:
                return name
            if not is_preemptible and need[name] > self.nonpreemptible_left(team, name) + _SLACK:
                return name
            if not may_borrow and need[name] > self.nominal_left(team, name) + _SLACK:
                return name
        return None

    def nonpreemptible_left(self, team: str, name: str) -> float:
        """How much more of what nobody may ask for again the team may hold: its own, or without one what is spare."""
        if name not in self.limited:
            return math.inf
        if (account := self._node(team, name)).is_named:
            return account.subtree_quota - self._nonpreemptible[account.number]
        return self.unassigned[name] - self._nonpreemptible[self._node(_ROOT, name).number]

    def nominal_left(self, team: str, name: str) -> float:
        """How much more the team may hold without borrowing; what no team above it has a quota of is not borrowed."""
        if name not in self.limited or not (account := self._node(team, name)).is_named:
            return math.inf
        return account.subtree_quota - self._used[account.number]

    def may_reclaim(self, team: str, need: Resources) -> bool:
        """Whether what it lacks is its own, lent to others, or what its place in the fleet is held by them."""
        has_own = False
        for name in self.names:
            if name in need and (account := self._node(team, name)).is_named:
                if need[name] > account.subtree_quota - self._used[account.number] + _SLACK:
                    return False
                has_own = True
        return has_own

    def borrows(self, team: str, names: Iterable[str]) -> bool:
        return any(team in self.borrowers[name] for name in self.limited.intersection(names))

    def borrowing(self, names: Iterable[str]) -> frozenset[str]:
        """The teams that hold more than their own of any of these: the same set until that changes."""
        limited = tuple([name for name in self.names if name in names])
        if (found := self._borrowing.get(limited)) is None:
            found = self._borrowing[limited] = frozenset[str]().union(*[self.borrowers[name] for name in limited])
        return found

    def subtree_quota(self, team: str, name: str) -> float:
        return self._node(team, name).subtree_quota if name in self.limited else 0.0

    def ancestors(self, team: str) -> Iterator[str]:
        """The team and those above it."""
        while spec := self.specs.get(team):
            yield team
            team = spec.parent

    def _left(self, account: ResourceNode) -> float:
        used, kept = self._used[account.number], account.local_quota
        if account.above is None:
            return account.subtree_quota - used
        more = self._left(account.above)
        if account.borrow is not None:
            more = min(more, account.subtree_quota - kept - max(0.0, used - kept) + account.borrow)
        return (kept - used if kept > used else 0.0) + more

    def _add(self, account: ResourceNode, amount: float) -> None:
        used = self._used
        while amount:
            number, kept, most = account.number, account.local_quota, account.subtree_quota + _SLACK
            before = used[number]
            after = used[number] = before + amount
            if account.above is None:
                return
            if (after > most) != (before > most):
                self.borrowers[account.name].symmetric_difference_update((account.team,))
                self._borrowing.clear()
            amount = (after - kept if after > kept else 0.0) - (before - kept if before > kept else 0.0)
            account = account.above

    def _node(self, team: str, name: str) -> ResourceNode:
        """Of a limited resource; opened for who is first heard of, who has no quota."""
        if (found := self._nodes[name].get(team)) is None:
            found = self._open(team, name, (0.0, 0.0))
        return found

    def _open_all(self, name: str) -> None:
        """The root's first; a team's own is known when those of its children are."""
        children, shares = defaultdict[str, list[str]](list), dict[str, tuple[float, float]]()
        for team, spec in self.specs.items():
            children[spec.parent].append(team)

        def lent(team: str) -> float:
            spec = self.specs[team]
            own = spec.quota.get(name, 0.0)
            for child in children[team]:
                own += lent(child)
            kept = max(0.0, own - spec.lend[name]) if name in spec.lend else 0.0
            shares[team] = own, kept
            return own - kept

        promised = sum(spec.quota.get(name, 0.0) for spec in self.specs.values())
        self.unassigned[name] = max(0.0, self.supply.get(name, 0.0) - promised)
        self.borrowers[name], self._nodes[name] = set(), {}
        self._open(_ROOT, name, (sum(lent(team) for team in children[_ROOT]) + self.unassigned[name], 0.0))
        for team, share in reversed(shares.items()):  # who is above before who is below
            self._open(team, name, share)

    def _open(self, team: str, name: str, share: tuple[float, float]) -> ResourceNode:
        spec = self.specs.get(team, _ANY)
        account = self._nodes[name][team] = ResourceNode(
            number=len(self._used),
            team=team,
            name=name,
            subtree_quota=share[0],
            local_quota=share[1],
            borrow=spec.borrow.get(name),
            is_named=any(name in self.specs[above].quota for above in self.ancestors(team)),
            above=None if team == _ROOT else self._node(spec.parent, name),
        )
        self._used.append(0.0)
        self._nonpreemptible.append(0.0)
        return account


_ANY = TeamSpec()
