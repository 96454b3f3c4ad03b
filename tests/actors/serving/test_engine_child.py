"""The engine's process: a model of an object store in it, its start, and its warm-up."""

from __future__ import annotations

import asyncio
import math
import os
from pathlib import Path

import httpx
import pytest
from tests.actors.engine.families import save_family
from tests.actors.engine.tiny import save_llama

from raytide.actors.engine.types import GenRequest
from raytide.actors.models.model_cache import staged_model
from raytide.actors.serving.engine_child import EngineChild
from raytide.core.errors import DeniedError
from raytide.core.objects.endpoint import ServeSpec


@pytest.mark.asyncio
@pytest.mark.usefixtures("aws")
async def test_a_model_of_an_object_store_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    save_llama(tmp_path / "model")
    store = boto3.client("s3")
    store.create_bucket(Bucket="models")
    for path in (tmp_path / "model").iterdir():
        store.upload_file(str(path), "models", f"tiny/{path.name}")
    engine = {"kind": "native", "num_blocks": 32, "device": "cpu"}
    spec = ServeSpec(name="tiny", model="s3://models/tiny", engine=engine)
    staged = await asyncio.to_thread(staged_model, spec.model)
    assert staged.path.startswith(str(tmp_path / "tmp"))
    phases: list[str] = []
    child = await EngineChild.start(spec, "127.0.0.1", "r", model_dir=staged.path, on_phase=phases.append)
    try:
        assert phases == ["load", "warm-up"]
        assert (await child.engine.stats()).generated_tokens == 1, "the warm-up's"
        chunks = [chunk async for chunk in child.engine.generate(GenRequest(request_id="1", prompt="the tide"))]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens > 0
        async with httpx.AsyncClient(base_url=f"http://{child.metrics}") as http:
            own = (await http.get("/metrics")).text
            both = (await http.get("/metrics", params={"names": "vllm"})).text
        assert 'raytide_prompt_tokens_total{endpoint="tiny",replica="r",revision=""}' in own
        assert "vllm:" not in own
        assert 'vllm:num_requests_running{engine="r",model_name="tiny",revision=""} 0.0' in both
    finally:
        await child.stop(1.0)


@pytest.mark.asyncio
async def test_a_spec_cannot_name_the_copies_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    copy = tmp_path / f"raytide-{os.getuid()}" / "models" / ("ab" * 16)
    copy.mkdir(parents=True)
    spec = ServeSpec(name="tiny", model=str(copy), engine={"kind": "native"})
    with pytest.raises(DeniedError, match="local copy made by raytide"):
        await EngineChild.start(spec, "127.0.0.1", "r", model_dir=staged_model(spec.model).path)


@pytest.mark.asyncio
async def test_a_model_that_classifies_is_served(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen3-tied", classifies=True, num_labels=1)
    engine = {"kind": "native", "num_blocks": 32, "device": "cpu"}
    spec = ServeSpec(name="ranks", model=str(tmp_path), engine=engine)
    child = await EngineChild.start(spec, "127.0.0.1", "r", model_dir=spec.model)
    try:
        ((logit,),) = await child.engine.classify([[1, 2]])
        assert math.isfinite(logit)
    finally:
        await child.stop(1.0)
