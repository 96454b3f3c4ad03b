"""The same builds on real Ray Data, in placement groups that leave no CPU outside them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytide.core.errors import DataError
from raytide.core.io.token_dataset import verify
from raytide.core.specs.data import DataSpec
from raytide.pipelines.build import Progress, build
from raytide.pipelines.runner import InlineRunner

pytestmark = pytest.mark.cluster

SpecOf = Callable[..., DataSpec]


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """A Ray of its own with 2 CPUs."""
    import ray

    before = os.environ.get("RAY_AUTH_MODE")
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(
        address="local",
        num_cpus=2,
        namespace="raytide",
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
        _node_ip_address="127.0.77.1",
    )
    try:
        yield ray
    finally:
        ray.shutdown()
        if before is None:
            del os.environ["RAY_AUTH_MODE"]
        else:
            os.environ["RAY_AUTH_MODE"] = before


@contextmanager
def leased(ray: Any, cpus: float) -> Iterator[Any]:
    """A placement group like a lease's: one bundle."""
    group = ray.util.placement_group([{"CPU": cpus}])
    ray.get(group.ready(), timeout=60)
    try:
        yield group
    finally:
        ray.util.remove_placement_group(group)


def files_in(out: str) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(Path(out).rglob("*")) if p.is_file()}


def test_any_number_of_workers_builds_the_bytes_that_one_process_builds(
    ray_cluster: Any, corpus: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytide.pipelines.build.MAX_CHUNK_PARTS", 4)  # several tasks for each worker
    alone = spec_of(corpus, out=str(corpus.parent / "alone"))
    build(alone, runner=InlineRunner())
    with leased(ray_cluster, 2) as group:
        for workers in (1, 3):
            spec = spec_of(corpus, out=str(corpus.parent / f"out-{workers}"), workers=workers)
            seen: list[Progress] = []
            assert build(spec, group, seen.append) == verify(spec.out)
            assert files_in(spec.out) == files_in(alone.out)
            assert seen[-1].stage == "done"


def test_a_lease_of_one_cpu_is_enough(ray_cluster: Any, corpus: Path, spec_of: SpecOf) -> None:
    with leased(ray_cluster, 1) as group, leased(ray_cluster, 1):
        assert build(spec_of(corpus), group).documents == 40


def test_bad_input_that_a_worker_finds_is_the_same_clear_error(
    ray_cluster: Any, tmp_path: Path, spec_of: SpecOf
) -> None:
    pq.write_table(pa.table({"text": [1.5]}), tmp_path / "in.parquet")
    with leased(ray_cluster, 2) as group, pytest.raises(DataError, match="cannot read column 'text'") as caught:
        build(spec_of(tmp_path / "in.parquet"), group)
    assert type(caught.value) is DataError
    assert caught.value.hint == "It must hold strings."
    assert not Path(spec_of(tmp_path).out).exists()
