"""Documents that share a row are computed as if each had a row of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.actors.trainer.parallel.test_layouts import BASE, FAMILIES
from torch import Tensor

from raytide.actors.models.families import architecture_of
from raytide.actors.trainer.model.activation_checkpointing import checkpoint_layer, compile_layer
from raytide.actors.trainer.model.attention import attend, flex
from raytide.actors.trainer.model.transformer import Transformer, positions_in_documents
from raytide.core.specs.train import MemorySpec
from raytide.kernels.core import AttentionSpec

LENGTHS = ([7, 1, 16, 8], [32], [20, 12])
DOCUMENTS = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in LENGTHS])


def model_of(**config: Any) -> Transformer:
    torch.manual_seed(1)
    model = Transformer(architecture_of({**BASE, "num_hidden_layers": 2, "n_layer": 2, **config}, "test"), 32)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_gives_the_logits_and_gradients_of_separate_documents(family: str) -> None:
    model = model_of(**FAMILIES[family])
    ids = torch.randint(0, 96, (3, 32))
    together = model(ids, None, DOCUMENTS)
    together.square().sum().backward()
    gradients = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    scale = float(together.detach().abs().max())
    for row, lengths in enumerate(LENGTHS):
        for document, logits in zip(ids[row].split(lengths), together[row].split(lengths), strict=True):
            alone = model(document[None])
            assert float((alone[0] - logits).detach().abs().max()) <= 1e-6 * max(1.0, scale)
            alone.square().sum().backward()
    alone_gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    largest = max(float(each.abs().max()) for each in gradients)  # that of GPT-2's key biases is only rounding
    for one, other in zip(gradients, alone_gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6 * largest)


def test_other_documents_and_masks_left_out_would_be_seen() -> None:
    model, ids = model_of(**FAMILIES["llama"]), torch.randint(0, 96, (3, 32))
    with torch.no_grad():
        masked = model(ids, None, DOCUMENTS)
        assert float((masked - model(ids)).abs().max()) > 0.01
        other = ids.clone()
        other[0, :7] = (other[0, :7] + 1) % 96
        changed = (model(other, None, DOCUMENTS) - masked).abs().amax(-1)
    assert float(changed[0, 7:].max()) == 0.0
    assert float(changed[0, :7].min()) > 0.0


@pytest.mark.parametrize(
    "memory",
    [
        MemorySpec(checkpointing="full"),
        MemorySpec(checkpointing="selective"),
        MemorySpec(compile=True, compile_backend="aot_eager"),
    ],
)
def test_checkpointed_and_compiled_layers_see_the_documents(memory: MemorySpec) -> None:
    plain, changed = model_of(**FAMILIES["llama"]), model_of(**FAMILIES["llama"])
    ids = torch.randint(0, 96, (3, 32))
    for layer in changed.layers.values():
        checkpoint_layer(layer, memory)
        compile_layer(layer, memory)
    for model in (plain, changed):
        model(ids, ids, DOCUMENTS).backward()
    for one, other in zip(plain.parameters(), changed.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad, other.grad, atol=1e-5 * float(one.grad.abs().max()))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("length", [32, 12])
def test_the_kernel_of_gpus_masks_documents_alike(window: int | None, softcap: float | None, length: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, length, 16), torch.randn(3, 2, 32, 16), torch.randn(3, 2, 32, 16)
    spec = AttentionSpec(0.3, window, softcap)
    with torch.no_grad():
        for documents in (DOCUMENTS, DOCUMENTS.flip(0)):  # a mask is not kept for other documents
            assert torch.allclose(flex(q, k, v, spec, documents), attend(q, k, v, spec, documents), atol=1e-5)


def test_rows_of_one_tensor_have_masks_of_their_own() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 32, 16) for _ in range(3))
    spec = AttentionSpec(0.3, None, None)
    for row in range(3):
        documents = DOCUMENTS[row : row + 1]
        with torch.no_grad():
            assert torch.allclose(flex(q, k, v, spec, documents), attend(q, k, v, spec, documents), atol=1e-5)


def test_positions_restart_with_each_document() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 2, 2], [3, 3, 3, 3, 3, 3]])
    wanted: Tensor = torch.tensor([[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]])
    assert torch.equal(positions_in_documents(documents), wanted)
