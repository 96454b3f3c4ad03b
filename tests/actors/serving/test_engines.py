"""The engine of an endpoint: the one that is named, or the one that fits its device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytide.actors.serving import engines
from raytide.actors.serving.engines import build_engine, check_members, choose_engine, vllm_config, vllm_sizes
from raytide.core.errors import ConfigError, DeniedError
from raytide.core.io.private_paths import ROOTS
from raytide.core.objects.endpoint import ServeSpec


def spec(**fields: object) -> ServeSpec:
    return ServeSpec.parse({"name": "m", "model": "/m", **fields}, where="serve")


@pytest.mark.parametrize(
    ("fields", "kind", "why"),
    [
        ({}, "native", "no GPU"),
        ({"engine": {"kind": "auto"}}, "native", "no GPU"),
        ({"gpus": "H100:1"}, "vllm", "vLLM's kernels"),
        ({"gpus": 0.5}, "vllm", "vLLM's kernels"),
        ({"gpus": 1, "engine": {"kind": "native"}}, "native", "reference operators, which are slow"),
        ({"engine": {"kind": "native"}}, "native", "name it."),
        ({"engine": {"kind": "vllm"}}, "vllm", "name it."),
    ],
)
def test_auto_is_vllm_on_a_gpu_and_raytides_own_on_a_cpu(fields: dict[str, object], kind: str, why: str) -> None:
    choice = choose_engine(spec(**fields))
    assert choice.kind == kind
    assert why in choice.why


def test_a_gpu_without_vllm_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed here") as refused:
        build_engine(spec(gpus=1))
    assert "pip install vllm" in refused.value.hint
    assert "engine kind native" in refused.value.hint


def test_an_engine_that_does_not_exist_and_one_that_spans_no_members_are_refused() -> None:
    with pytest.raises(ConfigError, match="asks for engine 'vlm'"):
        choose_engine(spec(engine={"kind": "vlm"}))


def test_members_of_the_native_engine_have_equally_many_processes_that_divide_the_heads(tmp_path: Path) -> None:
    assert "with 2 processes on 2 members" in choose_engine(spec(members=2)).why
    assert "with 6 processes on 2 members" in choose_engine(spec(members=2, engine={"tensor_parallel": 6})).why
    assert "with 4 processes." in choose_engine(spec(engine={"tensor_parallel": 4})).why
    for size in (3, 0, "2"):
        with pytest.raises(ConfigError, match=r"tensor_parallel .* and 2 members"):
            choose_engine(spec(members=2, engine={"tensor_parallel": size}))
    piped = spec(members=4, engine={"pipeline_parallel": 2})
    assert "with 4 processes on 4 members" in choose_engine(piped).why
    assert build_engine(piped.model_copy(update={"model": str(tmp_path)}))._config.tensor_parallel == 2  # type: ignore[attr-defined]
    for stages in (3, 0, "2"):
        with pytest.raises(ConfigError, match=r"pipeline_parallel .* and 4 members"):
            choose_engine(spec(members=4, engine={"pipeline_parallel": stages}))
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config, **heads}))
    check_members(spec(model=str(tmp_path), members=2))
    with pytest.raises(ConfigError, match="tensor_parallel 3 does not divide the model's 4 heads"):
        check_members(spec(model=str(tmp_path), members=3))
    with pytest.raises(ConfigError, match="pipeline_parallel 2 is more than the model's 1 layers"):
        check_members(spec(model=str(tmp_path), members=2, engine={"pipeline_parallel": 2}))
    assert choose_engine(spec(members=2, adapters={"a": "/a"})).kind == "native"
    assert choose_engine(spec(engine={"tensor_parallel": 2}, adapters={"a": "s3://bucket/a"})).kind == "native"
    with pytest.raises(ConfigError, match="has adapter s3://bucket/a, which is copied to the first member's node"):
        choose_engine(spec(members=2, adapters={"a": "s3://bucket/a"}))


@pytest.mark.parametrize("fields", [{"model": "{}/far"}, {"model": "{}/data/link"}, {"model": "{}/data/model"}])
def test_an_engine_opens_nothing_outside_of_the_data_roots(
    fields: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("far", "data/model"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "data" / "link").symlink_to(tmp_path / "far")
    (tmp_path / "data" / "model" / "weights").symlink_to(tmp_path / "far")
    monkeypatch.setenv(ROOTS, f'["{tmp_path}/data"]')
    engine = {"kind": "fake"}
    with pytest.raises(DeniedError, match="data roots"):
        build_engine(spec(model=fields["model"].format(tmp_path), engine=engine))
    with pytest.raises(DeniedError, match="data roots"):
        build_engine(spec(model=f"{tmp_path}/data", engine={**engine, "model_dir": fields["model"].format(tmp_path)}))


@pytest.mark.parametrize(
    ("gpus", "own", "sizes"),
    [
        (None, {}, (2, 1)),
        (8, {}, (8, 2)),
        (8, {"tensor_parallel_size": 16}, (16, 1)),
        (8, {"pipeline_parallel_size": 4}, (4, 4)),
        (1, {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, (2, 3)),
    ],
)
def test_vllm_shares_layers_within_a_member_and_gives_each_member_its_layers(
    gpus: float | None, own: dict[str, int], sizes: tuple[int, int]
) -> None:
    chosen = spec(gpus=gpus, members=2, engine={"kind": "vllm", "vllm": own})
    assert vllm_sizes(chosen) == sizes
    assert f"with {sizes[0] * sizes[1]} processes on 2 members" in choose_engine(chosen).why
    config = vllm_config(chosen, "elsewhere", {"vllm": own}).vllm
    assert (config["tensor_parallel_size"], config["pipeline_parallel_size"]) == sizes


@pytest.mark.parametrize("size", [0, 3, "two"])
def test_processes_of_vllm_that_the_members_do_not_divide_are_refused(size: object) -> None:
    with pytest.raises(ConfigError) as refused:
        choose_engine(spec(members=2, gpus=1, engine={"kind": "vllm", "vllm": {"tensor_parallel_size": size}}))
    assert "whose product the members divide" in refused.value.hint


def test_a_pipeline_of_vllm_on_cpus_is_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size 2 on CPUs"):
        choose_engine(spec(members=2, engine={"kind": "vllm", "vllm": {"pipeline_parallel_size": 2}}))


@pytest.mark.parametrize(
    ("gpus", "own", "utilization"),
    [(0.5, {}, 0.46), (1, {}, None), (0.25, {"gpu_memory_utilization": 0.2}, 0.2)],
)
def test_vllm_takes_its_share_of_a_gpu_so_that_another_one_starts_beside_it(
    gpus: float, own: dict[str, object], utilization: float | None
) -> None:
    engine = build_engine(spec(gpus=gpus, engine={"vllm": own} if own else {}))
    assert engine._config.vllm.get("gpu_memory_utilization") == utilization  # type: ignore[attr-defined]
