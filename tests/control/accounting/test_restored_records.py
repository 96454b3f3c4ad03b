"""A restored controller does nothing until it is told to go on, and then books and ends what it did not know."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.control.test_controller import Loop

from raytide.control.backup.contents import Contents
from raytide.control.backup.restore import SKIPPED_NUMBERS, hold_back
from raytide.control.backup.run import BackupManifest
from raytide.control.backup.state_copy import copy_state
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import JobKind, JobSpec, JobState
from raytide.core.objects.node import NodeState
from raytide.core.specs.order import OrderSpec
from raytide.core.state import Store
from raytide.ledger.reconcile import reconcile

RESUME = OrderSpec(id="resume-it", kind="resume", subject="local")


@pytest.fixture
def restored(tmp_path: Path) -> Iterator[Loop]:
    """A cluster whose state is of an earlier time than its machines: a job ran then, and another was bought for
    since."""
    loop = Loop(tmp_path)
    loop.submit()
    loop.until(lambda: loop.state("job-1") is JobState.RUNNING)
    copy = tmp_path / "copy.db"
    copy_state(f"sqlite:///{tmp_path / 'state.db'}", copy)
    manifest = BackupManifest(
        cluster="local",
        at_s=loop.clock.now_s(),
        raytide="1",
        run_dir="/r",
        state_sha256="",
        staging="/s",
        contents=Contents(),
    )
    loop.submit(resources={"CPU": 2.0})
    loop.until(lambda: loop.state("job-2") is JobState.RUNNING)
    hold_back(copy, manifest, "0123abcd")
    loop.store.close()
    loop.store = Store.open(f"sqlite:///{copy}")
    loop.controller = loop.fresh()
    yield loop
    loop.store.close()


def test_ids_of_a_state_without_jobs_are_not_given_again_either(tmp_path: Path) -> None:
    """The first snapshot of a cluster has none, and Ray may still know those of the time after it."""
    state = tmp_path / "state.db"
    Store.open(f"sqlite:///{state}").close()
    manifest = BackupManifest(
        cluster="local", at_s=1.0, raytide="1", run_dir="/r", state_sha256="", staging="/s", contents=Contents()
    )
    hold_back(state, manifest, "0123abcd")
    store = Store.open(f"sqlite:///{state}")
    one = GangSpec(shapes=(Shape(resources={"CPU": 1.0}),))
    job = store.submit_job(JobSpec(kind=JobKind.GANG, name="next", gang=one), "ana", 2.0)
    records = store.load()
    store.close()
    first = 1 + SKIPPED_NUMBERS
    assert (job.id, records.next_node, records.next_lease) == (f"job-{first}", first, first)


def act(loop: Loop) -> tuple[object, ...]:
    """Everything that the controller can do to the world."""
    world = loop.world
    ended = tuple(machine.ended_at_s for machine in world.bought.values())
    return (
        tuple(world.launches),
        ended,
        dict(world.placed),
        dict(world.running),
        set(world.drained),
        dict(world.serving),
    )


def errors(loop: Loop) -> list[str]:
    return list(json.loads((loop.folder / "live.json").read_text())["errors"])


def test_on_hold_it_ends_and_buys_and_starts_nothing_and_says_what_it_would_do(restored: Loop) -> None:
    before = act(restored)
    entries = restored.store.books.entries()
    restored.submit()
    restored.tick(200)
    assert act(restored) == before
    assert restored.store.books.entries() == entries
    [why] = errors(restored)
    unknown = sorted(set(restored.world.bought) - {node.id for node in restored.store.nodes()})
    assert unknown
    assert all(node_id in why for node_id in unknown)
    assert "`raytide resume` goes on" in why
    assert restored.store.orders.hold() is not None


def test_told_to_go_on_it_ends_what_it_has_no_record_of_and_the_ledger_equals_the_bill(restored: Loop) -> None:
    unknown = set(restored.world.bought) - {node.id for node in restored.store.nodes()}
    restored.tick(10)
    restored.store.orders.add(RESUME, "ana", restored.clock.now_s())
    restored.tick(1)
    order = restored.store.orders.get("resume-it")
    assert order.done_at_s is not None and all(node_id in order.outcome for node_id in unknown)
    restored.until(lambda: all(restored.world.bought[node_id].ended_at_s is not None for node_id in unknown))
    restored.until(lambda: {n.id for n in restored.store.nodes() if n.state is NodeState.GONE} >= unknown)
    assert restored.state("job-1") is JobState.RUNNING, "its nodes are known and alive"
    restored.check_ledger()


def test_nodes_that_are_gone_are_booked_until_the_backup_and_their_job_goes_on_elsewhere(restored: Loop) -> None:
    """The machines were lost with all that the provider knew of them."""
    known = {node.id for node in restored.store.nodes(live=True)}
    restored.world.bought.clear()
    restored.world.running.clear()
    restored.world.placed.clear()
    restored.world.taken.clear()
    hold = restored.store.orders.hold()
    assert hold is not None
    restored.store.orders.add(RESUME, "ana", restored.clock.now_s())
    restored.until(lambda: restored.store.orders.hold() is None)
    gone = [node for node in restored.store.nodes() if node.id in known]
    assert {node.state for node in gone} == {NodeState.GONE}
    assert max(entry.to_us for entry in restored.store.books.entries()) <= hold.at_s * 1e6
    assert restored.store.books.intervals() == ()
    restored.until(lambda: restored.state("job-1") is JobState.RUNNING and bool(restored.world.bought))
    assert all(int(node_id.removeprefix("node-")) > SKIPPED_NUMBERS for node_id in restored.world.bought)
    lost = tuple(e for e in restored.store.books.entries() if e.node_id in known)
    assert reconcile((), lost) and sum(entry.amount_micro_usd for entry in lost) > 0


def test_while_the_provider_does_not_answer_it_stays_on_hold(restored: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ConnectionError("no route")

    restored.store.orders.add(RESUME, "ana", restored.clock.now_s())
    with monkeypatch.context() as patched:
        patched.setattr(restored.controller._sources.provider, "machines", fail)
        restored.tick(5)
        assert "the provider does not answer: no route" in errors(restored)[0]
        assert restored.store.orders.hold() is not None
    restored.tick(1)
    assert restored.store.orders.hold() is None


def test_killed_at_any_call_after_it_was_told_it_goes_on_once(restored: Loop) -> None:
    restored.store.orders.add(RESUME, "ana", restored.clock.now_s())
    unknown = set(restored.world.bought) - {node.id for node in restored.store.nodes()}
    for fuse in range(1, 8):
        restored.world.fuse = fuse
        restored.tick(3)
    restored.world.fuse = None
    restored.until(lambda: all(restored.world.bought[node_id].ended_at_s is not None for node_id in unknown))
    restored.check_ledger()
