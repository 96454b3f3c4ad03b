"""The lease of a cluster's head, on PostgreSQL: one machine leads, and a former one writes nothing."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import psycopg
import pytest

from raytide.core.errors import ConflictError, StorageError
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import JobKind, JobSpec
from raytide.core.objects.node import CapacityType, Node, NodeState
from raytide.core.state import Changes, Store, database
from raytide.core.state.registry.heads import HeadLease

LEASE_S = 10.0
SPEC = JobSpec(kind=JobKind.SCRIPT, name="job", gang=GangSpec(shapes=(Shape(members=1, resources={"CPU": 1.0}),)))
NODE = Node("node-1", "cpu2", "local", CapacityType.ON_DEMAND, 1, NodeState.REQUESTED, 1.0)


class Machine:
    """A machine that can be the head, with a clock that is moved by hand."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url, self.now_s = name, url, 0.0
        self.store = Store.open(url)
        self.lease = HeadLease(self.store._db, name, LEASE_S, lambda: self.now_s)

    def head(self) -> Store:
        """The store as the processes of this machine's head open it."""
        return Store.open(self.url, head_epoch=self.lease.epoch)


@pytest.fixture
def machines(postgres_server: str, migrated_template: str) -> Iterator[tuple[Machine, Machine]]:
    name = f"t{uuid.uuid4().hex}"
    with psycopg.connect(postgres_server.format("postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {migrated_template}")  # type: ignore[arg-type]
    with ExitStack() as stack:
        made = [Machine(each, postgres_server.format(name)) for each in ("a", "b")]
        for machine in made:
            stack.callback(machine.store.close)
        yield made[0], made[1]


def test_the_second_takes_over_once_the_lease_ran_out_and_not_before(machines: tuple[Machine, Machine]) -> None:
    a, b = machines
    assert a.lease.take() == "" and a.lease.left_s == LEASE_S
    for _ in range(20):
        a.now_s += LEASE_S / 2
        b.now_s += LEASE_S / 2
        a.lease.renew()
        assert b.lease.take() == "a"
    b.now_s += LEASE_S - 0.1
    assert b.lease.take() == "a"
    b.now_s += 0.1
    assert b.lease.take() == ""
    assert b.lease.epoch == a.lease.epoch + 1
    with pytest.raises(ConflictError, match="another machine leads"):
        a.lease.renew()
    a.lease.resign()
    assert a.lease.take() == "b", "what a former head gives up is nothing"


def test_a_takeover_goes_on_with_rays_tables_and_a_cluster_after_down_begins_with_others(
    machines: tuple[Machine, Machine],
) -> None:
    """Drivers of an earlier cluster would be taken for those of new jobs, and its endpoints would start again."""
    a, b = machines
    a.lease.take()
    a.lease.resign()
    b.lease.take()
    assert a.lease.life == b.lease.life > 0
    b.lease.resign(ends=True)
    a.lease.take()
    assert a.lease.life not in (0, b.lease.life)


def test_a_former_head_writes_nothing_whichever_process_it_is(machines: tuple[Machine, Machine]) -> None:
    a, b = machines
    a.lease.take()
    api, controller = a.head(), a.head()
    job = api.submit_job(SPEC, "ana", 1.0)
    assert controller.lead("a") == ""
    controller.check_lead()
    b.lease.take()
    b.now_s += LEASE_S
    assert b.lease.take() == ""
    for write in (
        lambda: api.submit_job(SPEC, "ana", 2.0),
        lambda: api.request_stop(job.id),
        lambda: api.heartbeat(job.id, 2.0),
        lambda: controller.commit(Changes(2.0, nodes=(NODE,))),
        lambda: controller.remove_old_jobs(9.0),
        controller.check_lead,
    ):
        with pytest.raises(ConflictError, match="this head was replaced"):
            write()
    assert controller.lead("a") != "", "nor does it lead among controllers again"
    successor = b.head()
    assert successor.lead("b") == "", "the lease of the former controller ended with that of its head"
    assert (successor.nodes(), successor.job(job.id).stop_requested) == ((), False)
    successor.commit(Changes(3.0, nodes=(NODE,)))
    for store in (api, controller, successor):
        store.close()


def test_one_that_stops_in_the_middle_of_a_write_does_not_keep_the_next_from_taking_over(
    machines: tuple[Machine, Machine],
) -> None:
    """PostgreSQL ends its session, so what it goes on with later is refused as a whole."""
    a, b = machines
    a.lease.take()
    api = a.head()
    b.lease.take()
    b.now_s += LEASE_S

    def write_with_a_pause() -> None:
        with api._db.write() as c:
            longest = c.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar()
            assert longest == f"{database.PAUSED_TRANSACTION_S}s"
            c.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = '1s'")  # as if all of it had passed
            c.exec_driver_sql("UPDATE counters SET next = next + 1000")
            assert b.lease.take() == "", "it waits for the end of the write, which is one of the database's"
            c.exec_driver_sql("UPDATE counters SET next = next + 1000")

    with pytest.raises(StorageError):
        write_with_a_pause()
    api.close()
    with b.store._db.read() as c:
        assert all(each < 1000 for each in c.exec_driver_sql("SELECT next FROM counters").scalars())


def test_of_two_that_wait_one_takes_over(machines: tuple[Machine, Machine]) -> None:
    a, b = machines
    former = HeadLease(a.store._db, "former", LEASE_S, lambda: 0.0)
    former.take()
    for machine in machines:
        machine.lease.take()
        machine.now_s += LEASE_S
    assert a.lease.take() == ""
    assert b.lease.take() == "a"


def test_a_lead_that_is_given_up_is_free_at_once_and_an_ended_cluster_is_over(
    machines: tuple[Machine, Machine],
) -> None:
    a, b = machines
    a.lease.take()
    a.lease.resign()
    assert b.lease.take() == ""
    assert not a.lease.has_ended()
    writer = b.head()
    b.lease.resign(ends=True)
    assert a.lease.has_ended()
    writer.submit_job(SPEC, "ana", 1.0)  # the last head closes the books after it
    writer.close()
    assert a.lease.take() == "", "a cluster that was ended may be started again"


def test_machines_that_wait_are_listed_until_they_lead_or_sign_off(machines: tuple[Machine, Machine]) -> None:
    a, b = machines
    assert a.store.heads() is None
    a.lease.take()
    b.lease.report_waiting()
    b.lease.report_waiting()
    found = a.store.heads()
    assert found is not None and (found.leader, found.standbys) == ("a", ("b",))
    b.lease.stop_waiting()
    found = a.store.heads()
    assert found is not None and found.standbys == ()
    with a.store._db.write() as c:
        c.exec_driver_sql("INSERT INTO leaders VALUES ('standby:gone', 0, 'gone', 1)")
    found = a.store.heads()
    assert found is not None and found.standbys == (), "it was last seen long ago"


def test_a_cluster_with_one_head_is_not_fenced(machines: tuple[Machine, Machine]) -> None:
    a, b = machines
    a.store.submit_job(SPEC, "ana", 1.0)
    b.store.submit_job(SPEC, "ana", 1.0)
    assert a.store.lead("a") == "" and b.store.lead("b") == "a"
