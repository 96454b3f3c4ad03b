"""Weights change on the session's cluster without new replicas, and a refusal leaves those that were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import raytide as rt
from raytide.actors.trainer.runners.local import train_local
from raytide.core.errors import ConflictError, DataError
from raytide.core.objects.endpoint import EndpointState, Replicas, ServeSpec
from raytide.core.specs.model import ModelSpec
from raytide.core.specs.train import TrainSpec

pytestmark = pytest.mark.cluster


def trained(dataset: Path, out: Path, **shape: int) -> str:
    model = ModelSpec(**{"dim": 64, "layers": 2, "heads": 4, "max_seq_len": 256, **shape})  # type: ignore[arg-type]
    spec = TrainSpec(
        dataset=str(dataset), out=str(out), model=model, steps=len(out.name), global_batch=2, micro_batch=2, seq_len=64
    )
    result = train_local(spec)
    assert result.model_dir is not None
    return result.model_dir


def test_weights_are_swapped_under_a_stream_and_others_are_refused(
    tide: rt.Client, dataset: Path, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    first, second = trained(dataset, tmp_path / "one"), trained(dataset, tmp_path / "second")
    wider = trained(dataset, tmp_path / "wider", dim=32)
    spec = ServeSpec(name="swapped", model=first, replicas=Replicas(min=2, max=2), resources={"CPU": 1})
    endpoint = tide.serve(spec).wait(replicas=2, timeout_s=360.0)
    before = {each.id for each in endpoint.status.startups}
    stream = endpoint.openai().completions.create(
        model="swapped", prompt="import", max_tokens=200, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    endpoint.swap_weights(second, timeout_s=180.0)
    assert {each.weights for each in endpoint.status.live} == {second}
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    for location, error in ((wider, ConflictError), (str(tmp_path), DataError)):
        with pytest.raises(error):
            endpoint.swap_weights(location, timeout_s=180.0)
    assert endpoint.refresh().status.endpoint.spec.weights == second
    eventually(lambda: {each.weights for each in endpoint.refresh().status.live} == {second})
    assert {each.id for each in endpoint.status.startups} == before
    assert [name for name, _ in endpoint.status.startups[0].phases] == ["node", "process", "stage", "load", "warm-up"]
    endpoint.delete()
    eventually(lambda: endpoint.refresh().status.endpoint.state is EndpointState.DELETED, within_s=60.0)
