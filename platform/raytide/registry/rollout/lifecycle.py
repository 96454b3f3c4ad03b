"""The life of a rollout. This module compares the two revisions, makes the next decision, and limits the number of
replicas of each revision.

Both revisions together may have at most one replica more than the endpoint may have without a rollout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter

from raytide.core.bounds import printable
from raytide.core.objects.endpoint import Endpoint, EndpointState
from raytide.core.objects.endpoint_load import EndpointLoad
from raytide.core.specs.rollout import CountedRevision, MetricLimit, Rollout, RolloutState
from raytide.registry.rollout.ab_test import Arm, last_look, look
from raytide.registry.rollout.canary import CRITERIA, CanaryState, RevisionCounts, begin, decide, regressions
from raytide.registry.rollout.share_test import BadShare
from raytide.registry.rollout.spec import AbTestSpec, RolloutSpec

GRACE_S = 3.0
"""The seconds from an outcome until the losing application begins to drain; by then gateways send it nothing."""
_STATE = TypeAdapter(CanaryState)
_GONE = frozenset({EndpointState.DELETING, EndpointState.DELETED})


@dataclass(frozen=True, slots=True)
class RolloutView:
    """All that is observed of one rollout: its endpoints, and the counts of its requests and feedback."""

    champion: Endpoint | None
    """The champion's endpoint; None once it is deleted."""
    challenger: Endpoint | None
    ready: int = 0
    """The number of the challenger's replicas that answer."""
    counts: Mapping[int, CountedRevision] = field(default_factory=dict)
    """The total counts since the begin of the rollout, by revision."""
    liked: Mapping[int, Mapping[int, tuple[int, float]]] = field(default_factory=dict)
    """In an A/B test, by revision and group of users: the number of judged answers and that of liked ones, or the
    number of a metric's values and their sum.
    """
    bad_values: Mapping[int, Mapping[str, tuple[int, int]]] = field(default_factory=dict)
    """In a canary, by revision and metric: the number of values since the begin of the rollout, and that of bad
    ones."""

    @property
    def needed(self) -> int:
        """The number of ready replicas that the challenger needs before it may serve alone."""
        return max(1, self.challenger.spec.replicas.min) if self.challenger is not None else 1


def advance_all(
    rollouts: Iterable[Rollout],
    endpoints: Mapping[str, Endpoint],
    loads: Mapping[str, EndpointLoad],
    counts: Mapping[int, Mapping[int, CountedRevision]],
    now_s: float,
    liked: Mapping[int, Mapping[int, Mapping[int, tuple[int, float]]]] = MappingProxyType({}),
    bad_values: Mapping[int, Mapping[int, Mapping[str, tuple[int, int]]]] = MappingProxyType({}),
) -> dict[int, Rollout]:
    """Returns all rollouts, by number, after one step of each.

    `endpoints` maps the names of Ray Serve applications to endpoints, with the bounds that users have configured. It
    does not contain deleted endpoints.
    """
    moved = {}
    for rollout in rollouts:
        load = loads.get(rollout.challenger_application)
        view = RolloutView(
            endpoints.get(rollout.champion_application),
            endpoints.get(rollout.challenger_application),
            0 if load is None else load.ready,
            counts.get(rollout.number, {}),
            liked.get(rollout.number, {}),
            bad_values.get(rollout.number, {}),
        )
        try:
            moved[rollout.number] = advance(rollout, view, now_s)
        except (ArithmeticError, ValueError) as error:  # numbers of its own: the other rollouts go on
            why = f"its revisions cannot be compared: {printable(str(error), 200)}"
            moved[rollout.number] = _decided(rollout, RolloutState.ROLLED_BACK, why, now_s)
    return moved


def advance(rollout: Rollout, view: RolloutView, now_s: float) -> Rollout:
    """Returns the rollout after one evaluation of both revisions."""
    if not rollout.state.is_live:
        loser = view.champion if rollout.loser == rollout.champion_application else view.challenger
        is_gone = rollout.ended_at_s is None and loser is None
        return replace(rollout, ended_at_s=now_s) if is_gone else rollout
    if view.champion is None or view.champion.state in _GONE:
        return _decided(rollout, RolloutState.STOPPED, "the endpoint was deleted", now_s)
    if rollout.asked == "stop":
        return _decided(rollout, RolloutState.STOPPED, _asked(rollout), now_s)
    if view.challenger is None or view.challenger.state in _GONE:
        return _decided(rollout, RolloutState.ROLLED_BACK, "the challenger was deleted", now_s)
    if view.challenger.state is EndpointState.FAILED:
        why = f"the challenger failed: {view.challenger.reason}"
        return _decided(rollout, RolloutState.ROLLED_BACK, why, now_s)
    try:
        spec = RolloutSpec.model_validate(rollout.plan)
    except ValueError as error:
        why = f"its plan cannot be read any more: {printable(str(error), 200)}"
        return _decided(rollout, RolloutState.ROLLED_BACK, why, now_s)
    if rollout.state is RolloutState.STARTING:
        return _started(rollout, spec, view, now_s)
    if rollout.asked == "promote":
        return _promoted(rollout, view, _asked(rollout), now_s)
    return _measured(rollout, spec, view, now_s)


def losing_endpoints(
    rollouts: Iterable[Rollout], endpoints: Mapping[str, Endpoint], now_s: float
) -> dict[str, Endpoint]:
    """Returns, by name, the applications that lost their rollout and must now drain and end."""
    found = {}
    for rollout in rollouts:
        loser = endpoints.get(rollout.loser)
        is_due = rollout.decided_at_s is not None and now_s - rollout.decided_at_s >= GRACE_S
        if not rollout.state.is_live and is_due and loser is not None and loser.state not in _GONE:
            why = f"the rollout of revision {rollout.challenger} is over: {rollout.state.replace('_', ' ')}"
            found[loser.name] = replace(loser, state=EndpointState.DELETING, reason=why)
    return found


def _started(rollout: Rollout, spec: RolloutSpec, view: RolloutView, now_s: float) -> Rollout:
    if view.ready > 0:
        if spec.canary is not None:
            state, decision = begin(spec.canary, now_s)
            percent, reason, progress = decision.percent, decision.reason, _dumped(state)
        else:
            percent, reason, progress = (0.0 if spec.ab is None else spec.ab.percent), "both revisions are ready", {}
        return replace(rollout, state=RolloutState.RUNNING, percent=percent, reason=reason, progress=progress)
    if now_s - rollout.created_at_s > spec.ready_within_s:
        why = f"no replica of the challenger answered within {spec.ready_within_s:g} s"
        return _decided(rollout, RolloutState.ROLLED_BACK, why, now_s)
    return rollout


def _measured(rollout: Rollout, spec: RolloutSpec, view: RolloutView, now_s: float) -> Rollout:
    """Returns the rollout after comparing the revisions by the counts since the last look."""
    before = rollout.progress.get("seen", {})
    sides = {"champion": rollout.champion, "challenger": rollout.challenger}
    seen = {side: _total(view.counts.get(revision)) for side, revision in sides.items()}
    values = {side: dict(view.bad_values.get(revision, {})) for side, revision in sides.items()}
    before_values = rollout.progress.get("metrics", {})
    champion, challenger = (
        replace(_since(seen[side], before.get(side, {})), metrics=_gained(values[side], before_values.get(side, {})))
        for side in sides
    )
    if spec.ab is not None:
        return _compared(replace(rollout, progress={**rollout.progress, "seen": seen}), spec.ab, view)
    if spec.canary is None:
        return replace(rollout, progress={**rollout.progress, "seen": seen})
    state = _STATE.validate_python(rollout.progress["canary"])
    state, decision = decide(spec.canary, state, champion, challenger, now_s)
    rollout = replace(rollout, progress={**_dumped(state), "seen": seen, "metrics": values})
    if decision.action == "roll_back":
        return _decided(rollout, RolloutState.ROLLED_BACK, decision.reason, now_s)
    if decision.action == "complete":
        return _promoted(rollout, view, decision.reason, now_s)
    return replace(rollout, percent=decision.percent, reason=decision.reason)


def _compared(rollout: Rollout, spec: AbTestSpec, view: RolloutView) -> Rollout:
    """Returns the rollout after one evaluation of its A/B test. The test never ends a rollout; only a user does."""
    champion, challenger = (_arm(view.liked.get(each, {})) for each in (rollout.champion, rollout.challenger))
    found = look(spec.test, champion, challenger, last_look(rollout.progress))
    dumped = {name: None if value in (math.inf, -math.inf) else value for name, value in asdict(found).items()}
    if spec.metric is None:
        what, sides = "liked answers", {"a": "the champion is liked better", "b": "the challenger is liked better"}
    else:
        what = spec.metric
        sides = {"a": f"the champion's {what} is better", "b": f"the challenger's {what} is better"}
    reason = sides.get(
        found.winner, found.reason.replace("a has", "the champion has").replace("b has", "the challenger has")
    )
    if found.low > -math.inf:
        unit = "+.1%" if spec.metric is None else "+.4g"
        interval = f"{found.low:{unit}} to {found.high:{unit}}"
        reason += f": {found.difference:{unit}} {what} ({interval}, p {found.p_value:.3g})"
    return replace(rollout, progress={**rollout.progress, "test": dumped}, reason=reason)


def _arm(liked: Mapping[int, tuple[int, float]]) -> Arm:
    arm = Arm()
    for group, (judged, total) in liked.items():
        arm.add(group, float(total), judged)
    return arm


def _promoted(rollout: Rollout, view: RolloutView, why: str, now_s: float) -> Rollout:
    """Returns the rollout in which the challenger serves alone, once it has enough ready replicas; until then, the
    rollout as it is.
    """
    if view.ready < view.needed:
        waits = f"{why}; {view.ready} of {view.needed} replicas of the challenger are ready"
        return replace(rollout, percent=100.0, reason=waits)
    return replace(_decided(rollout, RolloutState.PROMOTED, why, now_s), percent=100.0)


def _decided(rollout: Rollout, state: RolloutState, why: str, now_s: float) -> Rollout:
    return replace(rollout, state=state, percent=0.0, reason=why, decided_at_s=now_s)


def _asked(rollout: Rollout) -> str:
    return f"asked for by {rollout.asked_by}" + (f": {rollout.asked_why}" if rollout.asked_why else "")


def _dumped(state: CanaryState) -> dict[str, Any]:
    return {"canary": _STATE.dump_python(state, mode="json")}


_NAMES = tuple(name for name in RevisionCounts.__dataclass_fields__ if name != "metrics")


def _total(counted: CountedRevision | None) -> dict[str, int]:
    values = {} if counted is None else counted.model_dump(exclude={"rollout", "revision"})
    return {**dict.fromkeys(_NAMES, 0), **values}


def _since(total: Mapping[str, int], before: Mapping[str, int]) -> RevisionCounts:
    """Returns the difference of two totals."""
    gained: dict[str, Any] = {name: max(0, total[name] - before.get(name, 0)) for name in _NAMES}
    for whole, part in (("requests", "errors"), ("started", "late"), ("judged", "disliked")):
        gained[part] = min(gained[part], gained[whole])  # a thumb that was changed counts once
    return RevisionCounts(**gained)


def _gained(total: Mapping[str, tuple[int, int]], before: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, int]]:
    """Returns, for each metric, the number of new values and that of bad ones among them. A value that was replaced
    counts once.
    """
    gained = {}
    for metric, (number, bad) in total.items():
        earlier, earlier_bad = before.get(metric, (0, 0))
        new = max(0, number - earlier)
        gained[metric] = (new, min(new, max(0, bad - earlier_bad)))
    return gained


def proven_regressions(rollout: Rollout) -> dict[str, float]:
    """Returns the criteria by which a canary was rolled back. Each criterion maps to the excess, which is the
    challenger's share of bad observations minus the champion's.

    The result is empty for any other rollout or outcome.
    """
    if rollout.state is not RolloutState.ROLLED_BACK or "canary" not in rollout.progress:
        return {}
    try:
        spec = RolloutSpec.model_validate(rollout.plan)
        state = _STATE.validate_python(rollout.progress["canary"])
    except ValueError:  # an earlier release wrote it
        return {}
    return {} if spec.canary is None else regressions(spec.canary, state)


def judged_by(rollout: Rollout) -> tuple[str | None, Mapping[str, MetricLimit]]:
    """Returns the metric that decides an A/B test, and the limits of a canary's metrics by name. If the users' thumbs
    up and thumbs down decide the test, the metric is None.
    """
    try:
        spec = RolloutSpec.model_validate(rollout.plan)
    except ValueError:  # `advance` ends it
        return None, {}
    return (
        None if spec.ab is None else spec.ab.metric,
        {} if spec.canary is None else spec.canary.metrics,
    )


def intervals(
    counted: CountedRevision, values: Mapping[str, Sequence[int]] = MappingProxyType({})
) -> dict[str, tuple[float, float, float]]:
    """Returns (share, lower limit, upper limit) by criterion: the share of bad observations, and the limits of the
    share's 95 % interval.

    `values` maps each metric to the number of its values and the number of bad values among them.
    """
    known: dict[str, Any] = {name: value for name, value in _total(counted).items() if name in _NAMES}
    counts = RevisionCounts(**known)
    shares: dict[str, BadShare] = {criterion: counts.share(criterion) for criterion in CRITERIA}
    shares |= {f"metric {metric}": BadShare(number, bad) for metric, (number, bad) in values.items()}
    return {name: (each.mean, each.lower(0.025), each.upper(0.025)) for name, each in shares.items() if each.total}


def with_shares(
    endpoints: Mapping[str, Endpoint], rollouts: Iterable[Rollout], loads: Mapping[str, EndpointLoad]
) -> dict[str, Endpoint]:
    """Returns all endpoints. In a live rollout, the champion and the challenger get new replica bounds. These follow
    the share of the traffic that each of the two gets.

    Within these bounds the number of replicas follows the load as usual. The champion's maximum falls as the
    challenger's replicas become ready. The challenger's maximum rises as the champion's replicas end. After a
    rollout, the application that lost keeps its replicas until it drains.
    """
    found = dict(endpoints)
    for rollout in rollouts:
        champion = endpoints.get(rollout.champion_application)
        challenger = endpoints.get(rollout.challenger_application)
        if not rollout.state.is_live and (loser := endpoints.get(rollout.loser)) is not None:
            kept = loser.target_replicas  # none of them comes back; one that idles at zero gets no node any more
            found[loser.name] = _bounded(loser, min(1, kept), max(1, kept), min(1, loser.spec.replicas.min))
        if not rollout.state.is_live or champion is None or challenger is None:
            continue
        load = loads.get(challenger.name)
        ready = 0 if load is None else load.ready
        share = _share(rollout)
        both = max(champion.spec.replicas.max, challenger.spec.replicas.max) + 1
        most = min(math.ceil(challenger.spec.replicas.max * share), both - champion.target_replicas)
        found[challenger.name] = _bounded(challenger, math.ceil(challenger.spec.replicas.min * share), max(1, most), 1)
        least = math.ceil(champion.spec.replicas.min * (1.0 - min(1.0, rollout.percent / 100.0)))
        handed_over = 1 if rollout.percent >= 100.0 else 0  # also of a champion whose load does not fall
        most = min(champion.spec.replicas.max, both - ready - handed_over)
        found[champion.name] = _bounded(champion, least, max(1, most), min(1, champion.spec.replicas.min))
    return found


def _share(rollout: Rollout) -> float:
    """Returns the challenger's share of requests, including shadow copies. It is 1 during a promotion, shadows too."""
    shadow = RolloutSpec.model_validate(rollout.plan).shadow
    return min(1.0, max(rollout.percent, 0.0 if shadow is None else shadow.percent) / 100.0)


def _bounded(endpoint: Endpoint, least: int, most: int, never_below: int) -> Endpoint:
    bounds = {"min": min(max(least, never_below), most), "max": most}
    replicas = endpoint.spec.replicas.model_copy(update=bounds)
    return replace(endpoint, spec=endpoint.spec.model_copy(update={"replicas": replicas}))
