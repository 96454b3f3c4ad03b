"""Builds on gangs of one, two and four real nodes, which are killed at random moments: the bytes are the same."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.cluster_fixture import kill_raylet

import raytide as rt
from raytide.control.bootstrap.cluster_record import MARK, LocalCluster
from raytide.core.errors import RaytideError
from raytide.core.io.token_dataset import load_manifest, verify
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import JobState
from raytide.core.specs.data import DataSpec, TextFilter, TokenizerSpec, TrainTokenizer
from raytide.pipelines.build import build
from raytide.pipelines.runners.gang import MOST_CRASHES
from raytide.pipelines.runners.inline import InlineRunner

pytestmark = pytest.mark.cluster

SPOT = {"ray.io/market-type": "spot"}
SLOW_STAGE = "import time\ndef slow(text):\n    time.sleep({seconds})\n    return text\n"


@pytest.fixture
def spec_of(tmp_path: Path) -> Callable[..., DataSpec]:
    """Builds of 80 chunks, each a file, which are read as slowly as `seconds` say."""
    (tmp_path / "texts").mkdir()
    source = random.Random(3)
    for i in range(80):  # a chunk ends at 256 KiB
        words = (f"{source.randrange(5000)}" for _ in range(50_000))
        (tmp_path / "texts" / f"{i:02}.txt").write_text(" ".join(words))

    def make(name: str, members: int, seconds: float = 0.0) -> DataSpec:
        stage = tmp_path / "stage.py"
        stage.write_text(SLOW_STAGE.format(seconds=seconds))
        shape = Shape(members=members, min_members=1, resources={"CPU": 1}, labels=SPOT)
        return DataSpec(
            name=name,
            inputs=(str(tmp_path / "texts"),),
            out=str(tmp_path / name),
            filter=TextFilter(),
            cleaning={"rules": {"stages": [{"function": f"{stage}:slow"}]}},
            tokenizer=TokenizerSpec(train=TrainTokenizer(vocab_size=400, sample_documents=4)),
            shard_tokens=1 << 20,
            workers=members,
            gang=GangSpec(shapes=(shape,)),
        )

    return make


def files_in(out: str) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(Path(out).rglob("*")) if p.is_file()}


def finished_chunks(spec: DataSpec) -> int:
    return len(list(Path(spec.out, ".partial").glob("survey-*")))


def worker_pids(live: LocalCluster) -> list[int]:
    """The processes that build chunks."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        try:
            is_worker = "ray::_Process" in " ".join(process.info["cmdline"] or [])
            if is_worker and process.environ().get(MARK) == live.cluster_id:
                found.append(process.pid)
        except psutil.Error:  # it ended
            continue
    return found


def kill_at_random(live: LocalCluster, tide: rt.Client, run: rt.Run, chosen: random.Random, killed: list[int]) -> bool:
    """Ends a raylet of the gang, or one of its workers. Returns whether something was there to end. `killed` are the
    workers that were ended alone: a task that has ended MOST_CRASHES of them would fail the build.
    """
    nodes: list[str] = []
    if len(killed) >= MOST_CRASHES - 1 or chosen.random() < 0.5:
        with suppress(RaytideError):  # it waits for another lease
            nodes = [member.node_id for member in tide.client.lease(run.id).usable]
    workers = worker_pids(live)
    if nodes:
        try:
            kill_raylet(live, chosen.choice(nodes))
        except psutil.NoSuchProcess:  # it has just ended of an earlier kill
            return False
        return True
    if not workers or len(killed) >= MOST_CRASHES - 1:
        return False
    killed.append(chosen.choice(workers))
    os.kill(killed[-1], signal.SIGKILL)
    return True


def test_two_nodes_of_which_one_dies_build_the_bytes_that_one_process_builds(
    live: LocalCluster, tide: rt.Client, spec_of: Callable[..., DataSpec], eventually: Callable[..., None]
) -> None:
    spec = spec_of("two", members=2, seconds=0.1)
    run = tide.data(spec)
    eventually(lambda: finished_chunks(spec) >= 3 and len(tide.client.lease(run.id).usable) == 2)
    kill_raylet(live, tide.client.lease(run.id).usable[1].node_id)
    run.wait(timeout_s=400.0)
    alone = spec.model_copy(update={"out": f"{spec.out}-alone"})
    build(alone, runner=InlineRunner(8))
    assert verify(spec.out) == load_manifest(alone.out)
    assert files_in(spec.out) == files_in(alone.out)


@pytest.mark.soak
@pytest.mark.parametrize("members", [1, 4])
def test_one_and_four_nodes_build_the_same_bytes_after_ten_kills(
    live: LocalCluster, tide: rt.Client, spec_of: Callable[..., DataSpec], eventually: Callable[..., None], members: int
) -> None:
    """Twenty kills in both: of raylets and of workers, at random moments."""
    spec, chosen, kills = spec_of("many", members=members, seconds=1.0 * members), random.Random(members), 0
    run = tide.data(spec, max_restarts=30)  # the last node of a gang that is lost ends its driver
    killed: list[int] = []
    while kills < 10:
        before = finished_chunks(spec)
        eventually(lambda: finished_chunks(spec) > before or run.refresh().view.job.is_final, within_s=300.0)  # noqa: B023
        assert run.state is not JobState.SUCCEEDED, f"it was over after {kills} kills"
        assert not run.view.job.is_final, run.why()
        time.sleep(chosen.uniform(0.0, 1.5))
        kills += kill_at_random(live, tide, run, chosen, killed)
    run.wait(timeout_s=900.0)
    alone = spec.model_copy(update={"out": f"{spec.out}-alone"})
    build(alone, runner=InlineRunner(8))
    assert files_in(spec.out) == files_in(alone.out)
