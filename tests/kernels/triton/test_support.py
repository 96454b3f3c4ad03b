"""Without Triton, or without a GPU that it supports, torch's operators are used."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import fields
from unittest.mock import Mock

import pytest
import torch

from raytide.kernels import ref
from raytide.kernels.registry import Ops, ops_for
from raytide.kernels.triton import operators, support

REFERENCES = Ops(**{op.name: getattr(ref, op.name) for op in fields(Ops)})


@pytest.fixture(autouse=True)
def _probe_anew() -> Iterator[None]:
    support.can_run.cache_clear()
    yield
    support.can_run.cache_clear()


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.mark.parametrize("device", ["cuda", "rocm"])
def test_without_triton_the_references_are_used(device: str, monkeypatch: pytest.MonkeyPatch, ampere: None) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("raytide.kernels.triton.")]:
        if name not in (support.__name__, operators.__name__):
            monkeypatch.delitem(sys.modules, name)
    importlib.reload(operators)
    assert "raytide.kernels.triton.attention" not in sys.modules
    assert not support.is_installed() and not support.can_run()
    assert ops_for(device) == REFERENCES


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("device", ["cuda", "rocm"])
def test_without_a_gpu_the_references_are_used(device: str) -> None:
    assert ops_for(device) == REFERENCES


@pytest.mark.skipif(not support.is_installed(), reason="Triton is not installed; ./dev setup installs it")
@pytest.mark.parametrize("device", ["cuda", "rocm"])
def test_where_a_launch_succeeds_the_kernels_are_used_and_a_deterministic_engine_gets_the_invariant_ones(
    device: str, monkeypatch: pytest.MonkeyPatch, ampere: None
) -> None:
    from raytide.kernels.triton import norm

    monkeypatch.setattr(norm, "rms_is_right", lambda device: True)
    found, deterministic = ops_for(device), ops_for(device, deterministic=True)
    of_triton = {
        op.name for op in fields(Ops) if getattr(found, op.name).__module__.startswith("raytide.kernels.triton.")
    }
    assert of_triton == {"norm", "add_norm", "quantized_linear", "activate_mul", "experts", "rope_write", "attention"}
    assert found.linear is ref.linear
    for op in ("norm", "add_norm", "activate_mul", "rope_write"):
        assert getattr(deterministic, op) is getattr(found, op)
    for op in ("attention", "experts", "quantized_linear"):
        assert "triton" not in getattr(deterministic, op).__module__


@pytest.mark.skipif(not support.is_installed(), reason="Triton is not installed; ./dev setup installs it")
def test_a_launch_that_fails_is_reported_once_and_the_references_are_used(
    monkeypatch: pytest.MonkeyPatch, ampere: None, caplog: pytest.LogCaptureFixture
) -> None:
    from raytide.kernels.triton import norm

    monkeypatch.setattr(norm, "rms_is_right", Mock(side_effect=RuntimeError("Failed to find C compiler.\nSet CC.")))
    with caplog.at_level(logging.WARNING):
        assert not support.can_run() and not support.can_run()
    assert [record.getMessage() for record in caplog.records] == [
        "no GPU kernels, torch's operators are used instead: Failed to find C compiler."
    ]


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_gpus_older_than_ampere_use_the_references(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, ampere: None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert not support.can_run()


def test_amd_cards_without_the_wide_wavefront_use_the_references(monkeypatch: pytest.MonkeyPatch, ampere: None) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: Mock(warp_size=32))
    assert not support.can_run()
