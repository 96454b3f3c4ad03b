"""The resources that each team may hold: its own quota, and what other teams in the tree leave unused.

The arithmetic is Kueue's:
- A team's subtree quota is its own quota plus the quota that its children lend.
- The part of the subtree quota that the team does not lend is its local quota. It is guaranteed to the team.
- Usage beyond the local quota is charged to the parent team, and so on up to the root of the tree.
- Capacity of the fleet beyond all quotas belongs to the root. A quota for one team thus takes nothing from teams
  without a quota.
- A resource that no team's quota names is unlimited.
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
    """The constants of one team for one resource. The team's usage of the resource is in `Quotas`, at the index
    `number`.
    """

    number: int
    team: str
    resource: str
    subtree_quota: float
    """The team's own quota, and the quota that the teams below it lend."""
    local_quota: float
    """The part of the subtree quota that is not lent."""
    borrow: float | None
    """The most that the team may borrow; None for no limit."""
    is_named: bool
    """True if the team or an ancestor has a quota; else the team uses the root's."""
    parent: ResourceNode | None
    """The parent team's node; None at the root."""


@dataclass(slots=True, eq=False)
class Quotas:
    specs: Mapping[str, TeamSpec]
    supply: Resources
    """Resources of the largest possible fleet."""
    limited: frozenset[str] = frozenset()
    """The resources that some team names."""
    names: tuple[str, ...] = ()
    """The resources in `limited`, sorted."""
    unassigned: dict[str, float] = field(default_factory=dict)
    """Capacity of the fleet beyond all quotas, by resource."""
    borrowers: dict[str, set[str]] = field(default_factory=dict)
    """The teams that use more than their subtree quota, by limited resource."""
    _nodes: dict[str, dict[str, ResourceNode]] = field(default_factory=dict)
    """The nodes by limited resource and team."""
    _used: list[float] = field(default_factory=list)
    """The usage of each team and of its children beyond their local quota, by node number."""
    _nonpreemptible: list[float] = field(default_factory=list)
    """The usage of jobs that cannot be preempted, by node number. For teams without a quota it is counted at the
    root."""
    _borrowing: dict[tuple[str, ...], frozenset[str]] = field(default_factory=dict)
    """The results of `borrowing` since the borrowers last changed."""

    @classmethod
    def of(cls, teams: Iterable[Team], supply: Resources) -> Quotas:
        specs = {team.name: team.spec for team in teams}
        limited = frozenset(name for spec in specs.values() for name in spec.quota)
        quotas = cls(specs, supply, limited, tuple(sorted(limited)))
        for name in quotas.names:
            quotas._add_nodes(name)
        return quotas

    def copy(self) -> Quotas:
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
                self._add(node := self._node(team, name), need[name])
                if not is_preemptible:
                    fixed_at = node if node.is_named else self._node(_ROOT, name)
                    self._nonpreemptible[fixed_at.number] += need[name]

    def release(self, team: str, need: Resources) -> None:
        for name in self.names:
            if name in need:
                self._add(self._node(team, name), -need[name])

    def held(self, team: str, name: str) -> float:
        """Returns the usage that is charged to the team: its own usage, and its children's usage beyond their local
        quota.
        """
        return self._used[self._node(team, name).number] if name in self.limited else 0.0

    def available(self, team: str, name: str) -> float:
        """Returns the amount of the resource that the team may still reserve. This includes the quota that the team may
        borrow.
        """
        return self._available(self._node(team, name)) if name in self.limited else math.inf

    def lacking(
        self, team: str, need: Resources, *, is_preemptible: bool = True, may_borrow: bool = True
    ) -> str | None:
        """Returns the first resource whose quota is too small for `need`. Returns None if the quotas allow `need`.

        Jobs that cannot be preempted may not borrow.
        """
        for name in self.names:
            if name not in need:
                continue
            if need[name] > self._available(self._node(team, name)) + _SLACK:
                return name
            if not is_preemptible and need[name] > self.nonpreemptible_left(team, name) + _SLACK:
                return name
            if not may_borrow and need[name] > self.nominal_left(team, name) + _SLACK:
                return name
        return None

    def nonpreemptible_left(self, team: str, name: str) -> float:
        """Returns the amount of the resource that non-preemptible jobs may still reserve.

        For a team with a quota, the amount is the team's quota minus the use by its non-preemptible jobs. For a team
        without a quota, the amount is the capacity beyond all quotas, minus the part that non-preemptible jobs
        already use.
        """
        if name not in self.limited:
            return math.inf
        if (node := self._node(team, name)).is_named:
            return node.subtree_quota - self._nonpreemptible[node.number]
        return self.unassigned[name] - self._nonpreemptible[self._node(_ROOT, name).number]

    def nominal_left(self, team: str, name: str) -> float:
        """Returns the amount of the resource that the team may reserve without borrowing. The amount is infinite if
        neither the team nor an ancestor has a quota for the resource.
        """
        if name not in self.limited or not (node := self._node(team, name)).is_named:
            return math.inf
        return node.subtree_quota - self._used[node.number]

    def may_reclaim(self, team: str, need: Resources) -> bool:
        """Returns True if `need` is within the team's nominal quota, even if other teams are borrowing that quota."""
        has_own = False
        for name in self.names:
            if name in need and (node := self._node(team, name)).is_named:
                if need[name] > node.subtree_quota - self._used[node.number] + _SLACK:
                    return False
                has_own = True
        return has_own

    def borrows(self, team: str, names: Iterable[str]) -> bool:
        return any(team in self.borrowers[name] for name in self.limited.intersection(names))

    def borrowing(self, names: Iterable[str]) -> frozenset[str]:
        """Returns the teams that borrow any of these resources. The same object is returned until the set of teams
        changes.
        """
        limited = tuple([name for name in self.names if name in names])
        if (found := self._borrowing.get(limited)) is None:
            found = self._borrowing[limited] = frozenset[str]().union(*[self.borrowers[name] for name in limited])
        return found

    def subtree_quota(self, team: str, name: str) -> float:
        return self._node(team, name).subtree_quota if name in self.limited else 0.0

    def ancestors(self, team: str) -> Iterator[str]:
        """Yields the team itself and then its ancestors."""
        while spec := self.specs.get(team):
            yield team
            team = spec.parent

    def _available(self, node: ResourceNode) -> float:
        used, local = self._used[node.number], node.local_quota
        if node.parent is None:
            return node.subtree_quota - used
        more = self._available(node.parent)
        if node.borrow is not None:
            more = min(more, node.subtree_quota - local - max(0.0, used - local) + node.borrow)
        return (local - used if local > used else 0.0) + more

    def _add(self, node: ResourceNode, amount: float) -> None:
        used = self._used
        while amount:
            number, local, most = node.number, node.local_quota, node.subtree_quota + _SLACK
            before = used[number]
            after = used[number] = before + amount
            if node.parent is None:
                return
            if (after > most) != (before > most):
                self.borrowers[node.resource].symmetric_difference_update((node.team,))
                self._borrowing.clear()
            amount = (after - local if after > local else 0.0) - (before - local if before > local else 0.0)
            node = node.parent

    def _node(self, team: str, name: str) -> ResourceNode:
        """Returns the node for a team; created with zero quota for a team that has none."""
        if (found := self._nodes[name].get(team)) is None:
            found = self._add_node(team, name, (0.0, 0.0))
        return found

    def _add_nodes(self, name: str) -> None:
        """Creates the nodes of all teams for a resource, the root's first. A team's quota depends on those of its
        children.
        """
        children, shares = defaultdict[str, list[str]](list), dict[str, tuple[float, float]]()
        for team, spec in self.specs.items():
            children[spec.parent].append(team)

        def lent(team: str) -> float:
            spec = self.specs[team]
            own = spec.quota.get(name, 0.0)
            for child in children[team]:
                own += lent(child)
            local = max(0.0, own - spec.lend[name]) if name in spec.lend else 0.0
            shares[team] = own, local
            return own - local

        assigned = sum(spec.quota.get(name, 0.0) for spec in self.specs.values())
        self.unassigned[name] = max(0.0, self.supply.get(name, 0.0) - assigned)
        self.borrowers[name], self._nodes[name] = set(), {}
        self._add_node(_ROOT, name, (sum(lent(team) for team in children[_ROOT]) + self.unassigned[name], 0.0))
        for team, share in reversed(shares.items()):  # parents before children
            self._add_node(team, name, share)

    def _add_node(self, team: str, name: str, share: tuple[float, float]) -> ResourceNode:
        spec = self.specs.get(team, _ANY)
        node = self._nodes[name][team] = ResourceNode(
            number=len(self._used),
            team=team,
            resource=name,
            subtree_quota=share[0],
            local_quota=share[1],
            borrow=spec.borrow.get(name),
            is_named=any(name in self.specs[above].quota for above in self.ancestors(team)),
            parent=None if team == _ROOT else self._node(spec.parent, name),
        )
        self._used.append(0.0)
        self._nonpreemptible.append(0.0)
        return node


_ANY = TeamSpec()
