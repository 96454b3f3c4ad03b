"""Adapters of endpoints over the API: what may be loaded, by whom, and that nothing is lost."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.control.api.test_tenancy import ANA, BOB, ROOT, client, clock  # noqa: F401

from raytide.control.api.services.endpoints import EndpointService

SHA = "a" * 64


@pytest.fixture
def web(client: TestClient, tmp_path: Path) -> Path:  # noqa: F811
    """An endpoint `web` and a folder of adapters."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for name in ("polite", "terse"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    body = {"name": "web", "model": str(tmp_path / "model"), "adapters": {"polite": str(tmp_path / "polite")}}
    assert client.post("/v1/endpoints", json=body).status_code == 200
    return tmp_path


def change(client: TestClient, headers: dict[str, str] = ANA, **body: object) -> Any:  # noqa: F811
    return client.post("/v1/endpoints/web/adapters", json=body, headers=headers)


def adapters(client: TestClient) -> dict[str, str]:  # noqa: F811
    found: dict[str, str] = client.get("/v1/endpoints/web").json()["endpoint"]["spec"]["adapters"]
    return found


def test_adapters_are_loaded_and_unloaded(client: TestClient, web: Path) -> None:  # noqa: F811
    assert change(client, load={"terse": str(web / "terse")}).status_code == 200
    assert adapters(client) == {name: str(web / name) for name in ("polite", "terse")}
    assert change(client, unload=["polite"]).status_code == 200
    assert adapters(client) == {"terse": str(web / "terse")}
    revisions = client.get("/v1/endpoints/web/revisions").json()
    assert [each["why"] for each in revisions] == ["adapters -polite", "adapters +terse", ""]


def test_changes_at_the_same_time_are_all_kept(client: TestClient, web: Path) -> None:  # noqa: F811
    names = [f"a{number}" for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda name: change(client, load={name: str(web / "terse")}).status_code, names))
    assert (set(done), set(adapters(client))) == ({200}, {"polite", *names})


def test_a_change_does_not_undo_a_spec_that_was_saved_meanwhile(
    client: TestClient,  # noqa: F811
    web: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its checks read files, and may take long."""
    (web / "newer").mkdir()
    (web / "newer" / "config.json").write_text("{}")
    check, bodies = EndpointService._checked, [{"name": "web", "model": str(web / "newer")}]

    def check_slowly(*args: Any) -> Any:
        if bodies:
            assert client.post("/v1/endpoints", json=bodies.pop()).status_code == 200
        return check(*args)

    monkeypatch.setattr(EndpointService, "_checked", check_slowly)
    response = change(client, load={"terse": str(web / "terse")})
    assert (response.status_code, client.get("/v1/endpoints/web").json()["endpoint"]["spec"]["model"]) == (
        409,
        str(web / "newer"),
    )
    assert change(client, load={"terse": str(web / "terse")}).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"unload": ["none"]}, 404, "has no adapter none"),
        ({"load": {"x": "/nowhere"}}, 400, "not an adapter's directory"),
        ({"load": {"x": "http://127.0.0.1/x"}}, 400, "which is not supported"),
        ({"load": {"x": "/etc"}}, 403, "folder of raytide or the system"),
        ({"load": {"a:b": "/x"}}, 400, "load"),
        ({"load": {"x": "registry:none:1"}}, 404, "none"),
        ({"loads": {}}, 400, "did you mean load"),
    ],
)
def test_what_cannot_be_is_refused(
    client: TestClient,  # noqa: F811
    web: Path,
    body: dict[str, object],
    status: int,
    says: str,
) -> None:
    answer = change(client, **body)
    assert (answer.status_code, says in json.dumps(answer.json())) == (status, True), answer.json()
    assert adapters(client) == {"polite": str(web / "polite")}


def test_another_team_changes_nothing(client: TestClient, web: Path) -> None:  # noqa: F811
    assert change(client, BOB, unload=["polite"]).status_code == 403
    assert adapters(client) == {"polite": str(web / "polite")}


def test_a_registered_adapter_is_resolved(client: TestClient, web: Path) -> None:  # noqa: F811
    body = {"name": "tone", "location": str(web / "polite"), "sha256": SHA}
    assert client.post("/v1/models", json=body).status_code == 200
    assert change(client, load={"tone": "registry:tone:1"}).status_code == 200
    assert adapters(client)["tone"] == str(web / "polite")


def test_an_engine_without_room_for_adapters_is_refused(client: TestClient, web: Path) -> None:  # noqa: F811
    body = {"name": "gpu", "model": str(web / "model"), "adapters": {"a": str(web / "polite")}}
    answer = client.post("/v1/endpoints", json={**body, "engine": {"kind": "vllm"}})
    assert (answer.status_code, "max_loras" in answer.json()["error"]["hint"]) == (400, True)


def test_only_hosted_apis_that_the_operator_allows_may_be_named(client: TestClient) -> None:  # noqa: F811
    backend = {"base_url": "https://api.example/v1", "model": "big"}
    answer = client.post("/v1/endpoints", json={"name": "far", "backend": backend})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "denied")
    mixed = client.post("/v1/endpoints", json={"name": "far", "model": "/m", "backend": backend})
    assert (mixed.status_code, "backend is for an endpoint without" in mixed.json()["error"]["message"]) == (400, True)


LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160,
         "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
         "rms_norm_eps": 1e-6}  # fmt: skip


def test_weights_of_the_same_architecture_are_swapped(client: TestClient, web: Path) -> None:  # noqa: F811
    shapes = {"model": LLAMA, "tuned": LLAMA, "deeper": {**LLAMA, "num_hidden_layers": 4}, "none": None}
    for name, shape in shapes.items():
        (web / name).mkdir(exist_ok=True)
        if shape is not None:
            (web / name / "config.json").write_text(json.dumps(shape))

    def swap(name: str, headers: dict[str, str] = ANA) -> Any:
        location = str(web / name) if name else ""
        return client.post("/v1/endpoints/web/weights", json={"location": location}, headers=headers)

    assert swap("tuned").json()["endpoint"]["spec"]["weights"] == str(web / "tuned")
    refused = swap("deeper", ROOT)  # the API tells others nothing of files that not everybody can read: replicas do
    assert (refused.status_code, "another architecture" in refused.json()["error"]["message"]) == (409, True)
    assert swap("none", ROOT).status_code == 400
    assert swap("tuned", BOB).status_code == 403
    spec = client.get("/v1/endpoints/web").json()["endpoint"]["spec"]
    assert (spec["weights"], spec["model"]) == (str(web / "tuned"), str(web / "model"))
    assert swap("").json()["endpoint"]["spec"]["weights"] == ""
    assert [each["why"] for each in client.get("/v1/endpoints/web/revisions").json()[:2]] == [
        "weights of the model",
        f"weights {web / 'tuned'}",
    ]
