"""Resources that a holder has released and Ray has not got back yet are still booked to it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.ledger.test_occupancy import JOB, TOTAL, lease, view

from raytide.core.objects.gang import MemberState
from raytide.core.objects.ledger_entry import EntryKind, Occupancy
from raytide.core.objects.snapshot import Snapshot
from raytide.ledger.occupancy import GRACE_S, RecentlyReleased, holders, occupancies

HELD = Snapshot(
    10.0, (), nodes=(view(available={"CPU": 7.0, "GPU": 3.0}),), jobs=(JOB,), leases=(lease(MemberState.READY),)
)
"""The job holds a quarter of the node."""


def after(release: Snapshot, *, at_s: float = 11.0) -> dict[str, float]:
    """The node's occupancy at `at_s`, the lease having been seen for the last time at 10 s."""
    leaving = RecentlyReleased().observe(holders(HELD), 10.0).observe(holders(release), 11.0)
    if at_s > 11.0:
        leaving = leaving.observe(holders(release), at_s)
    return weights(occupancies(release, leaving.held)["node-1"])


def weights(occupancy: Occupancy) -> dict[str, float]:
    return {str(share.kind): share.weight for share in occupancy}


def released(available: dict[str, float]) -> Snapshot:
    return replace(HELD, nodes=(view(available=available),), jobs=(), leases=())


def test_what_a_job_let_go_of_is_the_jobs_while_ray_shows_it_in_use() -> None:
    assert after(released({"CPU": 7.0, "GPU": 3.0})) == {"job": 0.25, "idle": 0.75}


def test_it_is_idle_as_soon_as_ray_has_it_back() -> None:
    assert after(released(TOTAL)) == {"idle": 1.0}


def test_what_others_use_beside_it_is_unmanaged() -> None:
    assert after(released({"CPU": 7.0, "GPU": 1.0})) == {"job": 0.25, "unmanaged": 0.5, "idle": 0.25}


def test_after_a_while_it_is_somebody_elses() -> None:
    busy = released({"CPU": 7.0, "GPU": 3.0})
    assert after(busy, at_s=11.0 + GRACE_S - 1) == {"job": 0.25, "idle": 0.75}
    assert after(busy, at_s=11.0 + GRACE_S) == {"unmanaged": 0.25, "idle": 0.75}


def test_whoever_has_the_seat_now_pays_for_it() -> None:
    other = replace(JOB, id="job-2")
    taken = replace(HELD, jobs=(other,), leases=(replace(lease(MemberState.ASSIGNED), job_id="job-2"),))
    leaving = RecentlyReleased().observe(holders(HELD), 10.0).observe(holders(taken), 11.0)
    shares = occupancies(taken, leaving.held)["node-1"]
    assert {share.subject for share in shares if share.kind is EntryKind.JOB} == {"job-2"}


def test_a_job_that_gives_one_of_two_seats_back_pays_for_both_until_the_group_is_gone() -> None:
    both = replace(HELD, nodes=(view(available={"CPU": 6.0, "GPU": 2.0}),), leases=(lease(*[MemberState.READY] * 2),))
    one = replace(both, leases=(lease(MemberState.READY, MemberState.WAITING),))
    leaving = RecentlyReleased().observe(holders(both), 10.0).observe(holders(one), 11.0)
    assert weights(occupancies(one, leaving.held)["node-1"]) == {"job": 0.5, "idle": 0.5}


def test_seats_given_back_one_after_the_other_are_all_the_jobs_until_they_are_free() -> None:
    busy = (view(available={"CPU": 6.0, "GPU": 2.0}),)
    both = replace(HELD, nodes=busy, leases=(lease(*[MemberState.READY] * 2),))
    one, none = (replace(both, leases=seats) for seats in ((lease(MemberState.READY),), ()))
    leaving = RecentlyReleased()
    for at_s, seen in enumerate((both, one, none)):
        leaving = leaving.observe(holders(seen), float(at_s))
    assert weights(occupancies(none, leaving.held)["node-1"]) == {"job": 0.5, "idle": 0.5}


@given(
    cpus=st.floats(min_value=0, max_value=8),
    gpus=st.floats(min_value=0, max_value=4),
    seats=st.integers(min_value=0, max_value=2),
    leave=st.booleans(),
)
def test_a_node_is_always_booked_whole(cpus: float, gpus: float, seats: int, leave: bool) -> None:
    both = replace(HELD, leases=(lease(*[MemberState.READY] * 2),))
    now = replace(released({"CPU": cpus, "GPU": gpus}), jobs=(JOB,))
    now = replace(now, leases=() if leave else (lease(*[MemberState.READY] * seats),))
    leaving = RecentlyReleased().observe(holders(both), 10.0).observe(holders(now), 11.0)
    assert sum(share.weight for share in occupancies(now, leaving.held)["node-1"]) >= 1.0 - 1e-6
