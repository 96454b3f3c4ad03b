"""The state of one admission cycle: free capacity by node, quotas, budgets, and the decisions made so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from raytide.core.objects.gang import Lease, Member, Shape
from raytide.core.objects.job import Job
from raytide.core.objects.node import ACCELERATOR_LABEL, NodeType, Resources
from raytide.core.objects.plan import Rejected
from raytide.core.objects.snapshot import Snapshot
from raytide.queue.admission import usage
from raytide.queue.admission.fit_index import FitIndex
from raytide.queue.admission.shape_request import AffordableShapes, ShapeRequest, ShapeRequests
from raytide.queue.budget import Budgets
from raytide.queue.quota import Quotas
from raytide.scheduling.diagnosis import Unschedulable
from raytide.scheduling.market_constraint import constrain
from raytide.scheduling.state import Placements, SchedulingState


@dataclass(frozen=True, slots=True)
class Admission:
    shape: Shape
    placed: Placements
    reserved_micro_usd: int


@dataclass(slots=True, eq=False)
class AdmissionState:
    """The state of one admission cycle. A row is an index into `jobs`.

    The resources of yielding members count as free. Slots that are nominated for waiting members count as taken.
    """

    snapshot: Snapshot
    jobs: Sequence[Job]
    leases: dict[int, Lease]
    """The leases that stay, by row."""
    room: SchedulingState
    quotas: Quotas
    budgets: Budgets
    requests: ShapeRequests
    node_types: Mapping[str, NodeType]
    """The node types by node id."""
    is_preemptible: Sequence[bool]
    """Indexed by row."""
    nominated: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """The node nominated for each waiting member, by row and index of the member; the node may have to be bought."""
    admitted: dict[int, Admission] = field(default_factory=dict)
    refused: dict[int, Unschedulable] = field(default_factory=dict)
    yielded: dict[int, dict[int, str]] = field(default_factory=dict)
    """The members that yield in this cycle, by row and index, with the job or endpoint that takes their place."""
    unplaced: list[Shape] = field(default_factory=list)
    """The shapes of replicas that did not fit, not even through preemption."""
    alternatives: dict[str, tuple[Rejected, ...]] = field(default_factory=dict)
    """The rejected alternatives to preemption, by preempting endpoint."""
    quota_owners: dict[str, dict[str, set[int]]] = field(default_factory=dict)
    """The rows that wait for their team's nominal quota, by resource and team. Other teams do not borrow this quota for
    members beyond a gang's minimum.
    """
    head: int | None = None
    """The first row in the order that found no room on nodes; None if there is none. Rows that only lack quota or
    budget do not count.
    """
    room_after_head: SchedulingState | None = None
    """The capacity that is left once the head has started. Jobs that cannot be preempted may use no other."""
    _full: dict[int, Unschedulable] = field(default_factory=dict)
    _affordable: dict[int, AffordableShapes] = field(default_factory=dict)
    _index: FitIndex | None = None
    _quota_by_type: dict[tuple[int, str], Resources] = field(default_factory=dict)

    def admit(self, row: int) -> bool:
        found = self._find(row)
        if isinstance(found, Unschedulable):
            self.refused[row] = found
            return False
        shape, placed = found
        job, types = self.jobs[row], usage.placed_types(placed, self.snapshot.node_types)
        need = usage.quota_usage(shape, types)
        self.quotas.reserve(job.spec.team, need, is_preemptible=self.is_preemptible[row])
        reserved = self.budgets.reserve(job, usage.price_per_hour(shape, types))
        self.admitted[row] = Admission(shape, placed, reserved)
        self.refused.pop(row, None)
        for waiting in self.quota_owners.values():
            waiting.get(job.spec.team, set()).discard(row)
        return True

    def add_quota_owner(self, row: int) -> None:
        requests = self.affordable_shapes(row).requests
        for name in {name for request in requests for name in self.quotas.limited & request.least.keys()}:
            self.quota_owners.setdefault(name, {}).setdefault(self.jobs[row].spec.team, set()).add(row)

    def release(self, row: int, members: Iterable[Member], by: str) -> None:
        """Makes members of a lease yield to `by`, a job or an endpoint. The members' resources and quota count as free
        from now on.
        """
        lease, job = self.leases[row], self.jobs[row]
        for member in members:
            self.release_on(self.node_of(row, member), lease.shape.resources)
            self.quotas.release(job.spec.team, self.member_quota(row, member))
            self.yielded.setdefault(row, {})[member.index] = by
        self._full.clear()

    def undo_release(self, row: int, members: Iterable[Member]) -> None:
        lease, job = self.leases[row], self.jobs[row]
        for member in members:
            self.reserve_on(self.node_of(row, member), lease.shape.resources)
            self.quotas.reserve(job.spec.team, self.member_quota(row, member))
            del self.yielded[row][member.index]
        if not self.yielded[row]:
            del self.yielded[row]

    def release_on(self, node_id: str, resources: Resources) -> None:
        self.room.release(node_id, resources)
        self.index.mark_changed(node_id)

    def reserve_on(self, node_id: str, resources: Resources) -> None:
        self.room.reserve(node_id, resources)
        self.index.mark_changed(node_id)

    def place(self, shape: Shape, count: int, subject: str, *, max_new: int | None = None) -> bool:
        """Reserves slots for `count` members, either for all of them or for none. Returns whether the slots were
        reserved.
        """
        placed = self.room.place(shape, count, subject=subject, max_new=max_new)
        if isinstance(placed, Unschedulable):
            return False
        for slot in placed:
            self.index.mark_changed(slot.node_id)
        return True

    def node_of(self, row: int, member: Member) -> str:
        """Returns the id of the member's node. If the member has no node yet, returns the id of the node that is
        nominated for the member, or "" if no node is nominated.
        """
        return member.node_id or self.nominated.get((row, member.index), "")

    def member_quota(self, row: int, member: Member) -> Resources:
        node_type = self.node_types.get(member.node_id)
        key = (row, "" if node_type is None else node_type.name)
        if (found := self._quota_by_type.get(key)) is None:
            found = self._quota_by_type[key] = usage.quota_usage(self.leases[row].shape, [node_type])
        return found

    def micro_usd_h(self, lease: Lease) -> float:
        """Returns the price in micro-dollars an hour of the lease's members that are neither parked nor yielding."""
        members = usage.retained_members(lease)
        types = [self.node_types[member.node_id] for member in members if member.node_id in self.node_types]
        return usage.price_per_hour(lease.shape, types)

    @property
    def index(self) -> FitIndex:
        if self._index is None:
            self._index = FitIndex(self.room)
        return self._index

    def may_reclaim(self, job: Job) -> bool:
        """Returns True if the job's minimum size fits into its team's nominal quota. Other teams may be borrowing that
        quota.
        """
        return self.quotas.may_reclaim(job.spec.team, self.requests.first(job).least)

    def preemptible_teams(self, job: Job) -> frozenset[str] | None:
        """Returns the teams that this job may preempt. None means all teams.

        A job that borrows quota may not preempt another team that is within its nominal quota, because that team would
        reclaim the quota at once.
        """
        need = self.requests.first(job).least
        if self.quotas.limited.isdisjoint(need) or self.quotas.may_reclaim(job.spec.team, need):
            return None
        return self.quotas.borrowing(need) | {job.spec.team}

    def reserve_to_grow(self, row: int, most: int) -> int:
        """Reserves slots for up to `most` more members of a lease, as far as quota, nodes and budgets allow. Returns
        the number of reserved slots.
        """
        job = self.jobs[row]
        shape = next(iter(constrain([self.leases[row].shape], self.snapshot.stances.get(job.id))), None)
        if shape is None or self.lacking_quota(row, (request := self.requests.request(shape)).one) is not None:
            return 0
        count, throughputs = min(most, self._allowed_members(row, request)), self.snapshot.paces.get(job.id)
        placed = self.room.place_some(shape, count, paces=throughputs)
        types = usage.placed_types(placed, self.snapshot.node_types)
        price = self.micro_usd_h(self.leases[row])
        more = {count: usage.price_per_hour(shape, types[:count]) for count in range(len(placed), 0, -1)}
        count = next((count for count, extra in more.items() if self.budgets.may_grow(job, price, extra)), 0)
        if count and self.budgets.refusal(job, more[count]) is not None:
            count = 0
        self._release_slots(shape, placed[count:])
        quota = usage.quota_usage(shape, types[:count])
        self.quotas.reserve(job.spec.team, quota, is_preemptible=self.is_preemptible[row])
        return count

    def affordable_shapes(self, row: int) -> AffordableShapes:
        found = self._affordable.get(row)
        if found is None or found.version != self.budgets.version:
            found = self._affordable[row] = AffordableShapes.of(self.jobs[row], self.requests, self.budgets)
        return found

    def lacking_quota(self, row: int, need: Resources) -> str | None:
        """Returns the first resource whose quota is too small for `need`. Returns None if the quotas allow `need`.

        Jobs that cannot be preempted, and jobs beyond a soft budget, may not borrow quota.
        """
        may_borrow = not self.affordable_shapes(row).over_soft_limit
        team = self.jobs[row].spec.team
        return self.quotas.lacking(team, need, is_preemptible=self.is_preemptible[row], may_borrow=may_borrow)

    def _find(self, row: int) -> tuple[Shape, Placements] | Unschedulable:
        """Returns the first of the job's shapes that fits, with its reserved slots; else the reason why none does."""
        refusals = []
        shapes = self.affordable_shapes(row)
        if not shapes.requests:
            reason = self.snapshot.stances[self.jobs[row].id].reason
            return Unschedulable("deadline", f"it {reason}.", "No action needed: it starts in time.")
        for request, unaffordable in zip(shapes.requests, shapes.unaffordable, strict=True):
            found = request.never or unaffordable or self._fit(row, request)
            if not isinstance(found, Unschedulable):
                return found
            refusals.append(found)
        return next((refusal for refusal in refusals if refusal.constraint != "impossible"), refusals[0])

    def _fit(self, row: int, request: ShapeRequest) -> tuple[Shape, Placements] | Unschedulable:
        """Returns the request's shape with its reserved slots. The shape names an accelerator if only nodes with this
        one are within the quotas. Returns the refusal if the shape fits nowhere.
        """
        shape = request.shape
        if (refusal := self._refuse_by_quota(row, request.least)) is not None:
            return refusal
        if (full := self._full.get(request.key)) is not None:
            return full
        found = self._place(row, request, shape)
        if not isinstance(found, Unschedulable):
            return shape, found
        if found.constraint == "quota" and ACCELERATOR_LABEL not in shape.labels:
            for model in self._accelerators():  # the cheapest one is beyond its quota, but another one may not be
                named = shape.model_copy(update={"labels": {**shape.labels, ACCELERATOR_LABEL: model}})
                if self.lacking_quota(row, usage.least_quota(named)) is not None:
                    continue
                if not isinstance(placed := self._place(row, request, named), Unschedulable):
                    return named, placed
        return found

    def _place(self, row: int, request: ShapeRequest, shape: Shape) -> Placements | Unschedulable:
        """Returns reserved slots for a shape of the request, or the refusal. A refusal reserves nothing."""
        job = self.jobs[row]
        count, throughputs = max(request.at_least, self._allowed_members(row, request)), self.snapshot.paces.get(job.id)
        placed = self.room.place(shape, count, at_least=request.at_least, subject="it", paces=throughputs)
        if isinstance(placed, Unschedulable):
            if shape is request.shape:
                self._full[request.key] = placed
            return placed
        for slot in placed:
            self.index.mark_changed(slot.node_id)
        # The accelerators and the price are known only now.
        types = usage.placed_types(placed, self.snapshot.node_types)
        quota_refusal = self._refuse_by_quota(row, usage.quota_usage(shape, types))
        retained = quota_refusal or self._within_budgets(job, shape, placed)
        if not isinstance(retained, Unschedulable):
            retained = self._beside_head(row, shape, retained)
        self._release_slots(shape, placed if isinstance(retained, Unschedulable) else placed[len(retained) :])
        return retained

    def _accelerators(self) -> list[str]:
        """Returns the accelerators of the node types, the one with the cheapest node first."""
        types = sorted(self.snapshot.node_types, key=lambda each: each.price_micro_usd_h)
        return list(dict.fromkeys(each.labels[ACCELERATOR_LABEL] for each in types if ACCELERATOR_LABEL in each.labels))

    def _release_slots(self, shape: Shape, slots: Placements) -> None:
        for slot in slots:
            self.release_on(slot.node_id, shape.resources)
        self.room.cancel_empty(slot.node_id for slot in slots if slot.is_new)  # else they would count as bought

    def _within_budgets(self, job: Job, shape: Shape, placed: Placements) -> Placements | Unschedulable:
        """Returns all placed slots if the budgets allow an hour of them, else the slots of the minimum, else the
        refusal.
        """

        def refuse(slots: Placements) -> Unschedulable | None:
            types = usage.placed_types(slots, self.snapshot.node_types)
            return self.budgets.refusal(job, usage.price_per_hour(shape, types))

        if refuse(placed) is None:
            return placed
        least = placed[: shape.at_least]
        return refuse(least) or least

    def _refuse_by_quota(self, row: int, need: Resources) -> Unschedulable | None:
        if (name := self.lacking_quota(row, need)) is None:
            return None
        quotas, team = self.quotas, self.jobs[row].spec.team
        free, own, used = quotas.available(team, name), quotas.subtree_quota(team, name), quotas.held(team, name)
        reason = f"team {team} has {used:g} of its {own:g} {name} in use and it needs {need[name]:g}"
        if need[name] > free:
            reason += f"; {max(0.0, free):g} more are available, borrowing included"
            remedy = f"It starts when {name} is free. To start now, raise the quota of {team}."
            return Unschedulable("quota", f"{reason}.", remedy)
        if over := self.affordable_shapes(row).over_soft_limit:
            reason += f"; {over} is beyond its soft budget and may not borrow"
            return Unschedulable("budget", f"{reason}.", f"Wait for its own quota, or raise the budget of {over}.")
        reason += "; a job that cannot be preempted may not borrow"
        return Unschedulable("quota", f"{reason}.", "Submit it as preemptible, or wait for the team's own quota.")

    def _allowed_members(self, row: int, request: ShapeRequest) -> int:
        """Returns the number of members that the quota allows."""
        quotas, team, most = self.quotas, self.jobs[row].spec.team, float(request.shape.members)
        for name, amount in request.one.items():
            if name not in quotas.limited or amount <= 0:
                continue
            more = quotas.available(team, name)
            if any(rows for owner, rows in self.quota_owners.get(name, {}).items() if owner != team):
                more = min(more, quotas.nominal_left(team, name))
            if not self.is_preemptible[row]:
                more = min(more, quotas.nonpreemptible_left(team, name))
            most = min(most, more / amount)
        return max(0, int(most + 1e-6))

    def _beside_head(self, row: int, shape: Shape, placed: Placements) -> Placements | Unschedulable:
        """Returns the slots that a job which cannot be preempted may take without delaying the head of the queue.

        The head then starts at the latest when all non-preemptible jobs that already ran when it began to wait have
        ended.
        """
        if self.head is None or self.room_after_head is None or self.is_preemptible[row]:
            return placed
        beside = self.room_after_head.place(shape, len(placed), at_least=shape.at_least, subject="it")
        if not isinstance(beside, Unschedulable):
            return placed[: len(beside)]
        head = self.jobs[self.head].id
        return Unschedulable(
            "behind",
            f"it cannot be preempted, and would take room that {head} waits for, which is before it in the queue.",
            f"It starts after {head}. A preemptible job may start before.",
        )
