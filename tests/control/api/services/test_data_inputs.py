"""The data of trainings and endpoints are measured at submission, where getting data to nodes has a price."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.control.conftest import NoMachines

from raytide.control.api.auth import ANY_TEAM, Caller
from raytide.control.api.services.service import ApiService
from raytide.core.clock import VirtualClock
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.objects.hardware.transfer import DataInput, TransferSection
from raytide.core.specs.data import DatasetVersionSpec
from raytide.core.specs.train import TrainSpec
from raytide.core.state import Store

CLUSTER = Path(__file__).parents[4] / "cluster.yaml"
CALLER = Caller(user="ana", team="default")
OPERATOR = Caller(user="root", team=ANY_TEAM)
"""The API reads files for a team only if all users of the machine may."""
TRANSFER = TransferSection.model_validate({"data": {"s3://data": ["us-east-1"]}, "other_usd_per_gb": 0.02})
CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 1}
Make = Callable[..., ApiService]


@pytest.fixture
def make(tmp_path: Path, store: Store) -> Make:
    def one(transfer: TransferSection | None = TRANSFER) -> ApiService:
        config = load_cluster(CLUSTER)
        settings = config.settings.model_copy(update={"transfer": transfer})
        return ApiService(
            store=store,
            config=config.model_copy(update={"settings": settings}),
            bill=NoMachines(),
            drivers=None,  # type: ignore[arg-type]
            clock=VirtualClock(1000.0),
            live=tmp_path / "live.json",
            serve_url="http://127.0.9.1:8000",
            ray_url="http://127.0.9.1:8265",
            ray_environment={},
        )

    return one


def training(service: ApiService, caller: Caller = CALLER, **changes: object) -> tuple[DataInput, ...]:
    """Submits a training of two members, and returns what each reads."""
    train = {"dataset": "s3://data/web", "out": "s3://data/out", "steps": 1, **changes}
    shape: dict[str, Any] = {"members": 2, "resources": {"GPU": 1}}
    body = {"kind": "train", "name": "t", "team": "default", "gang": {"shapes": [shape]}, "config": train}
    return service.jobs.submit(body, caller, None).job.spec.gang.shapes[0].inputs


def register(store: Store, team: str) -> None:
    version = DatasetVersionSpec(
        name=f"web-{team}",
        team=team,
        location="s3://data/web",
        sha256="a" * 64,
        documents=1,
        tokens=500_000_000_000,
        vocab_size=50_000,
    )
    store.datasets.register(version, "ana", 1.0)


def test_a_registered_dataset_in_a_bucket_is_read_in_slices(make: Make, store: Store) -> None:
    assert training(make()) == (), "nothing is known of its size"
    register(store, "product")
    assert training(make()) == (), "another team's versions are not looked at"
    register(store, "default")
    assert training(make()) == (DataInput(url="s3://data/web", gb=500),)
    assert training(make(transfer=None)) == ()


def test_a_dataset_on_disk_is_measured_and_a_model_is_read_whole(make: Make, tmp_path: Path) -> None:
    data, model = tmp_path / "data", tmp_path / "model"
    for folder in (data, model):
        folder.mkdir()
    shard = {"file": "0.bin", "sha256": "a" * 64, "tokens": 2_000_000}
    manifest = {"vocab_size": 512, "eos_id": 0, "dtype": "uint16", "documents": 1, "tokens": 2_000_000}
    manifest |= {"version": 1, "shards": [shard]}
    (data / "manifest.json").write_text(json.dumps(manifest))
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "model.safetensors").write_bytes(b"\0" * 3_000)
    found = training(make(), OPERATOR, dataset=str(data), init_from=str(model))
    assert {each.url: each.gb for each in found} == {str(data): 0.002, str(model): 3e-6}


def test_the_spec_is_parsed_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[object] = []
    parse = TrainSpec.parse

    def counting(values: Any, *, where: str) -> TrainSpec:
        parsed.append(values)
        return parse(values, where=where)

    monkeypatch.setattr(TrainSpec, "parse", counting)
    training(make())
    assert len(parsed) == 1


def test_what_the_spec_names_itself_is_kept(make: Make, store: Store) -> None:
    register(store, "default")
    own = {"url": "s3://data/other", "gb": 7.0}
    shape = {"members": 2, "resources": {"GPU": 1}, "inputs": [own]}
    train = {"dataset": "s3://data/web", "out": "s3://data/out", "steps": 1}
    body = {"kind": "train", "name": "t", "team": "default", "gang": {"shapes": [shape]}, "config": train}
    job = make().jobs.submit(body, CALLER, None).job
    assert job.spec.gang.shapes[0].inputs == (DataInput(url="s3://data/other", gb=7),)


def test_a_replica_reads_the_weights_of_its_model(make: Make, store: Store, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 4_000)
    body = {"name": "m", "model": str(tmp_path), "resources": {"CPU": 1}, "engine": {"kind": "native"}}
    make().endpoints.serve({**body, "team": "default"}, OPERATOR)
    assert store.endpoint("m").spec.inputs[0].gb == pytest.approx(4e-6)
