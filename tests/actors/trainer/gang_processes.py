"""A gang without Ray: the real driver over real workers, each in a process of the forkserver, and a lease by hand.

A start takes 0.3 s here and 10 s on Ray, so whoever dies, hangs or leaves at whatever moment is tested on this.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tests.actors.trainer.trainer_ranks import PRELOAD

from raytide.actors.trainer.data.order.shuffle import BatchSampler
from raytide.actors.trainer.data.token_dataset import TokenData
from raytide.actors.trainer.elastic.driver import run_train
from raytide.actors.trainer.elastic.worker import TrainWorker
from raytide.actors.trainer.runners.local import train_local
from raytide.actors.trainer.types import RunResult
from raytide.core.errors import LeaseLostError
from raytide.core.io.storage import exists, join, read_bytes
from raytide.core.objects.gang import Lease, LeaseState, Member, MemberState, Shape
from raytide.core.specs.train import TrainSpec

WAIT_S = 400.0

Prank = Callable[[], None]
"""A fault of a worker's process from its beginning; picklable."""


class GoneError(Exception):
    """The process of a worker ended."""


class ForkedWorker:
    """`Remote` over a pipe."""

    image = ""

    def __init__(self, spec: TrainSpec, member: Member, shape: Shape, prank: Prank | None = None) -> None:
        multiprocessing.set_forkserver_preload(PRELOAD)
        context = multiprocessing.get_context("forkserver")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, spec, member.address, prank), daemon=True)
        self._process.start()
        there.close()
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._asked = 0
        self._is_gone = False
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, method: str, *args: object) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._lock:
            if self._is_gone:
                answer.set_exception(GoneError("its process is gone"))
                return answer
            self._asked += 1
            self._waiting[self._asked] = answer
            with suppress(OSError):  # the reader sees that too, and fails all that wait
                self._pipe.send((self._asked, method, args))
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10.0)

    def _read(self) -> None:
        while True:
            try:
                number, ok, value = self._pipe.recv()
            except (EOFError, OSError):
                break
            with self._lock:
                answer = self._waiting.pop(number)
            if ok:
                answer.set_result(value)
            else:
                answer.set_exception(AssertionError(value))
        with self._lock:
            self._is_gone = True
            left = list(self._waiting.values())
        for answer in left:
            answer.set_exception(GoneError("its process is gone"))


def _serve(pipe: Connection, spec: TrainSpec, host: str, prank: Prank | None) -> None:
    torch.set_num_threads(1)
    if prank is not None:
        prank()
    worker, lock = TrainWorker(spec, 1, host), threading.Lock()

    def answer(number: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            ok, value = True, getattr(worker, method)(*args)
        except BaseException as error:
            ok, value = False, repr(error)
        with lock:
            pipe.send((number, ok, value))

    with ThreadPoolExecutor(8) as pool:
        while True:
            try:
                pool.submit(answer, *pipe.recv())
            except (EOFError, OSError):  # the test is over
                os._exit(0)


class FakeLeases:
    """A lease that the test changes by hand."""

    def __init__(self, shape: Shape) -> None:
        self._changed = threading.Condition()
        self._over = False
        self.reports: list[Mapping[str, float | int | str]] = []
        """The job's progress after each report."""
        empty = tuple(Member(index) for index in range(shape.members))
        self._lease = Lease("lease-1", "job-1", shape, LeaseState.ACTIVE, empty)

    def give(self, *indices: int) -> None:
        """Fill seats anew."""
        for index in indices:
            where = {"node_id": f"node-{index}", "address": f"127.0.0.{index + 1}"}
            self._set(index, state=MemberState.READY, placement_group_id=f"{index:032x}", **where)

    def notice(self, index: int, left_s: float = 60.0) -> None:
        self._set(index, state=MemberState.LEAVING, leaves_at_s=time.time() + left_s)

    def take(self, *indices: int) -> None:
        """The node is gone and the seat waits."""
        for index in indices:
            incarnation = self._lease.members[index].incarnation + 1
            self._set(index, state=MemberState.WAITING, incarnation=incarnation, leaves_at_s=None)

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def lease(self, job_id: str) -> Lease:
        with self._changed:
            if self._over:
                raise LeaseLostError(f"the lease of {job_id} is over.")
            return self._lease

    def wait_lease(self, job_id: str, *, newer_than: int, timeout_s: float) -> Lease:
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._lease.epoch > newer_than, timeout_s)
        return self.lease(job_id)

    def report(self, job_id: str, progress: Mapping[str, float | int | str]) -> None:
        self.reports.append({**(self.reports[-1] if self.reports else {}), **progress})  # merged, as the platform does

    def _set(self, index: int, **changes: Any) -> None:
        with self._changed:
            members = list(self._lease.members)
            members[index] = replace(members[index], **changes)
            self._lease = replace(self._lease, members=tuple(members), epoch=self._lease.epoch + 1)
            self._changed.notify_all()


class Run:
    """A training run in a thread of the test, with what it wrote so far. `pranks`: of each member, one per start."""

    def __init__(self, spec: TrainSpec, shape: Shape, pranks: Mapping[int, list[Prank]] | None = None) -> None:
        self.spec, self.leases = spec, FakeLeases(shape)
        self._pranks = {index: list(each) for index, each in (pranks or {}).items()}
        self._pool = ThreadPoolExecutor(max_workers=1)
        self.leases.give(*range(shape.members))
        self.future: Future[RunResult] = self._pool.submit(run_train, spec, self.leases, "job-1", start=self._start)

    def _start(self, spec: TrainSpec, member: Member, shape: Shape) -> ForkedWorker:
        pranks = self._pranks.get(member.index)
        return ForkedWorker(spec, member, shape, pranks.pop(0) if pranks else None)

    def close(self) -> None:
        self.leases.end()
        self.future.exception(timeout=WAIT_S)
        self._pool.shutdown()

    def result(self) -> RunResult:
        return self.future.result(timeout=WAIT_S)

    def events(self, what: str) -> list[dict[str, Any]]:
        return [event for event in lines(self.spec, "events.jsonl") if event["event"] == what]

    def until(self, what: str, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            if self.future.done():
                raise AssertionError(f"the run ended before {what}: {self.future.result()}")
            assert time.monotonic() < deadline, f"{what} did not happen: {lines(self.spec, 'events.jsonl')}"
            time.sleep(0.01)

    def until_step(self, step: int) -> None:
        self.until(f"step {step}", lambda: any(done >= step for done in self.steps()))

    def steps(self) -> list[int]:
        """As they were done, some of them more than once."""
        return [line["step"] for line in lines(self.spec, "metrics.jsonl")]

    def workers(self) -> dict[int, int]:
        """The process of each member that was ready last."""
        return {int(event["host"].split()[1]): event["pid"] for event in self.events("ready")}

    @property
    def worlds(self) -> list[int]:
        return [event["world"] for event in self.events("formed")]

    def pid(self, member: int) -> int:
        """Returns the process of the rank on that member, in the newest generation. In an object store the events may
        come later than the steps, which another process writes."""
        self.until("a generation", lambda: self.events("formed"))
        formed = self.events("formed")[-1]
        pids: list[int] = [
            p for p, host in zip(formed["pids"], formed["hosts"], strict=True) if f"node-{member} " in host
        ]
        return pids[0]


def lines(spec: TrainSpec, name: str) -> list[dict[str, Any]]:
    """Returns the lines of a file that may be in the middle of being written."""
    url = join(spec.out, name)
    text = read_bytes(url).decode() if exists(url) else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def losses(spec: TrainSpec) -> list[float]:
    """Returns the losses by step; the last one of a step that was done again."""
    by_step = {line["step"]: line["loss"] for line in lines(spec, "metrics.jsonl")}
    return [by_step[step] for step in sorted(by_step)]


def samples(spec: TrainSpec) -> dict[int, Counter[int]]:
    """The sample ids of each step, over all ranks, of its last time."""
    last: dict[int, tuple[int, Counter[int]]] = {}
    for file in sorted((Path(spec.out) / "samples").glob("*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            generation, ids = last.get(line["step"], (-1, Counter()))
            if line["generation"] > generation:
                generation, ids = line["generation"], Counter()
            if line["generation"] == generation:
                ids.update(line["ids"])
            last[line["step"]] = generation, ids
    return {step: ids for step, (_, ids) in last.items()}


def assert_undisturbed(spec: TrainSpec, tolerance: float = 1e-5) -> None:
    """The run's losses are those of one process, and every step used exactly its samples."""
    reference: list[float] = []
    alone = spec.model_copy(
        update={"out": spec.out + "-alone", "record_samples": False, "checkpoint_every": spec.steps}
    )
    train_local(alone, on_step=lambda result: reference.append(result.loss))
    assert max(abs(a - b) for a, b in zip(losses(spec), reference, strict=True)) <= tolerance
    sampler = BatchSampler(spec.seed, TokenData(spec.dataset, spec.seq_len).n_sequences, spec.global_batch)
    assert samples(spec) == {step + 1: Counter(sampler.ids(step).tolist()) for step in range(spec.steps)}


def node_of(host: str) -> str:
    """The node in `Hand.host`."""
    return host.split("(")[1].split()[0]
