"""Endpoints that an earlier release has deployed, when a controller of this release starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from ray import serve

from raytide.actors.engine.backends.remote import wire
from raytide.actors.serving.ray_serve import deployment
from raytide.actors.serving.ray_serve.control import ServeControl
from raytide.actors.serving.ray_serve.keys import spec_key
from raytide.core import ray_internals
from raytide.core.objects.endpoint import Endpoint, EndpointState, ServeSpec

SPEC = ServeSpec(name="m", model="/models/m", engine={"kind": "fake"})
ENDPOINT = Endpoint(spec=SPEC, user="me", state=EndpointState.RUNNING, created_at_s=1.0, target_replicas=1)


class Gcs:
    def __init__(self) -> None:
        self.kept: dict[bytes, bytes] = {}

    def internal_kv_multi_get(self, keys: Sequence[bytes], *args: Any, **kwargs: Any) -> dict[bytes, bytes]:
        return {key: self.kept[key] for key in keys if key in self.kept}

    def internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, *args: Any, **kwargs: Any) -> None:
        if overwrite or key not in self.kept:
            self.kept[key] = value

    def internal_kv_del(self, key: bytes, *args: Any, **kwargs: Any) -> None:
        self.kept.pop(key, None)


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Gcs:
    gcs = Gcs()
    monkeypatch.setattr(ray_internals, "connected_gcs", lambda: gcs)
    monkeypatch.setattr(serve, "run_many", lambda *args, **kwargs: None)
    monkeypatch.setattr(serve, "RunTarget", lambda *args, **kwargs: None)
    monkeypatch.setattr(deployment, "application", lambda endpoint: None)
    return gcs


def test_fields_that_a_release_adds_replace_no_replicas(gcs: Gcs) -> None:
    """`pip` and `replicas.scale_on` were added while endpoints ran."""
    older = SPEC.model_dump(mode="json", exclude={"price": True, "pip": True, "replicas": {"scale_on"}})
    gcs.kept[spec_key("m")] = f"1.0 {json.dumps(older)}".encode()
    assert not ServeControl().deploy(ENDPOINT, is_there=True)
    assert b'"pip"' in gcs.kept[spec_key("m")]
    needs = SPEC.model_copy(update={"pip": ("peft==0.17",)})
    assert ServeControl().deploy(replace(ENDPOINT, spec=needs), is_there=True)


def test_replicas_that_no_gateway_understands_any_more_are_replaced_once(
    gcs: Gcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ServeControl().deploy(ENDPOINT, is_there=False)
    assert not ServeControl().deploy(ENDPOINT, is_there=True)
    monkeypatch.setattr(wire, "VERSION", wire.VERSION + 1)
    assert ServeControl().deploy(ENDPOINT, is_there=True)
    assert not ServeControl().deploy(ENDPOINT, is_there=True)
