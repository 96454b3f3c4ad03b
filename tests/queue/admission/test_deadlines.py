"""The queue enforces the market constraints of deadline jobs."""

from __future__ import annotations

from tests.queue.cluster import Cluster, gpus, team

from raytide.core.objects.node import MARKET_LABEL, CapacityType
from raytide.core.objects.plan import Admit, Preempt, Wait
from raytide.core.objects.snapshot import MarketConstraint
from raytide.queue.admission.scheduler import GRACE_S


def stance(*markets: CapacityType, is_urgent: bool = False) -> MarketConstraint:
    return MarketConstraint(markets, is_urgent, 9000.0, 3600.0, 5000.0, "waits for spot: 1.0 h of work, due soon")


def test_a_job_that_waits_for_spot_says_so_and_leaves_the_room_to_others() -> None:
    c = Cluster(nodes=1)
    first, second = c.submit(gpus(8)), c.submit(gpus(8))
    c.stances[first] = stance()
    actions = c.step()
    (wait,) = [action for action in actions if isinstance(action, Wait)]
    (admit,) = [action for action in actions if isinstance(action, Admit)]
    assert (wait.subject, wait.constraint) == (first, "deadline")
    assert wait.reason == "it waits for spot: 1.0 h of work, due soon."
    assert admit.job_id == second


def test_a_lease_does_not_keep_the_market_that_was_right_when_it_was_given() -> None:
    c = Cluster(nodes=1)
    job = c.submit(gpus(8))
    c.stances[job] = stance(CapacityType.SPOT)
    assert [a.constraint for a in c.step() if isinstance(a, Wait)] == ["impossible"]
    c.stances[job] = stance(CapacityType.ON_DEMAND, CapacityType.SPOT)
    (admit,) = [action for action in c.step() if isinstance(action, Admit)]
    assert admit.lease.shape == gpus(8)


def test_a_job_that_asks_for_the_same_in_both_markets_gets_a_lease_that_may_change_to_either() -> None:
    c = Cluster(nodes=1)
    job = c.submit(*(gpus(8, **{MARKET_LABEL: market}) for market in ("spot", "on-demand")))
    c.stances[job] = stance(CapacityType.ON_DEMAND, CapacityType.SPOT)
    (admit,) = [action for action in c.step() if isinstance(action, Admit)]
    assert admit.lease.shape == gpus(8)
    tied = Cluster(nodes=1)
    job = tied.submit(gpus(4, **{MARKET_LABEL: "spot"}), gpus(8, **{MARKET_LABEL: "on-demand"}))
    tied.stances[job] = stance(CapacityType.ON_DEMAND, CapacityType.SPOT)
    (admit,) = [action for action in tied.step() if isinstance(action, Admit)]
    assert admit.lease.shape == gpus(8, **{MARKET_LABEL: "on-demand"})


def test_an_urgent_job_is_admitted_before_older_ones_and_preempts_those_of_its_class() -> None:
    c = Cluster(nodes=1)
    holder = c.submit(gpus(8))
    c.step()
    older, urgent = c.submit(gpus(8)), c.submit(gpus(8))
    c.stances[urgent] = stance(CapacityType.ON_DEMAND, is_urgent=True)
    (gone,) = [action for action in c.step(60.0) if isinstance(action, Preempt)]
    assert gone.job_id == holder and urgent in gone.reason
    c.step(GRACE_S)
    assert c.running() == {urgent: 1} and c.held(older) == 0


def test_only_the_owner_of_borrowed_quota_preempts_an_urgent_job() -> None:
    c = Cluster(nodes=1, teams=(team("red", quota={"GPU": 8}), team("blue", quota={"GPU": 0}, borrow={"GPU": 8})))
    late = c.submit(gpus(8), team="blue", priority="low")
    c.step()
    c.stances[late] = stance(CapacityType.ON_DEMAND, is_urgent=True)
    c.submit(gpus(8), team="blue", priority="high")
    assert not any(isinstance(action, Preempt) for action in c.step(60.0))
    c.submit(gpus(8), team="red")
    assert [action.job_id for action in c.step(60.0) if isinstance(action, Preempt)] == [late]
