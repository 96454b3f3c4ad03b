"""A member answers orders that may fail, and says why they did."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.actors.engine.model.parallel.test_link import connected
from tests.actors.engine.tiny import save_llama

from raytide.actors.engine.model.input_batch import StepInputs
from raytide.actors.engine.model.lora import Adapter, LoraRows
from raytide.actors.engine.model.parallel.link import StepArrays, pack_step
from raytide.actors.engine.model.parallel.member import GroupMember
from raytide.actors.engine.model.parallel.shard import ModelShard
from raytide.kernels.core import PagedBatch

TERMS = {
    "device": "cpu",
    "dtype": "float32",
    "max_len": 64,
    "deterministic": False,
    "quantized_input": "float",
    "quantized_head": False,
    "pipeline_parallel": 1,
}


@pytest.mark.parametrize(
    ("order", "error"),
    [
        ({"prepare": TERMS | {"device": "abacus"}}, "unknown device"),
        ({"prepare": TERMS | {"dtype": "float16"}}, "cannot compute in float16"),
        ({"load": {"number": 1, "model_dir": "{}", "digest": "another"}}, "holds other weights for member 3"),
        ({"load": {"number": 1, "model_dir": "{}/nowhere", "digest": "x"}}, "holds no"),
    ],
)
def test_an_order_that_fails_is_answered_with_its_error(
    order: dict[str, dict[str, object]], error: str, tmp_path: Path
) -> None:
    save_llama(tmp_path)
    leader, link = connected("s", "s")
    member = GroupMember(link, {"rank": 3, "size": 4, "local_rank": 0, "own_host": "127.0.0.1", "model_dir": ""})
    ((name, terms),) = order.items()
    if "model_dir" in terms:
        terms = terms | {"model_dir": str(terms["model_dir"]).format(tmp_path)}
    leader.send({name: terms})
    leader.send({"nothing": 1})
    with pytest.raises(AttributeError, match="_order_nothing"):
        member.follow()
    answer = leader.receive()
    assert isinstance(answer, dict)
    assert error in answer["error"]["message"]
    leader.close()
    link.close()


@pytest.mark.parametrize(
    ("orders", "kept"),
    [
        ([], [1, 2, 3]),
        ([{"use": 2}], [2, 3]),
        ([{"use": 2}, {"use": 3}], [3]),
        ([{"use": 3}, {"use": 2}], [2]),
        ([{"drop_weights": 3}, {"drop_weights": 4}], [1, 2]),
        ([{"free_weights": True}], [2, 3]),
        ([{"free_weights": True}, {"use": 3}], [2, 3]),
    ],
)
def test_weights_are_kept_until_others_have_replaced_them(orders: list[dict[str, int]], kept: list[int]) -> None:
    leader, link = connected("s", "s")
    member = GroupMember(link, {})
    member._models, member._used = {number: object() for number in (1, 2, 3)}, 1  # type: ignore[misc]
    for order in (*orders, {"nothing": 1}):
        leader.send(order)
    with pytest.raises(AttributeError, match="_order_nothing"):
        member.follow()
    assert sorted(member._models) == kept
    leader.close()
    link.close()


@pytest.mark.parametrize("adapters", [[], [(2, 0, 1)]])
def test_a_step_without_adapters_is_computed_as_one_process_computes_it(adapters: list[tuple[int, int, int]]) -> None:
    seen: list[LoraRows | None] = []

    class Model:
        def hidden(self, step: StepInputs, cache: object) -> None:
            seen.append(step.loras)

        def new_cache(self, *_: int) -> list[torch.Tensor]:
            return []

    leader, link = connected("s", "s")
    member = GroupMember(link, {})
    member._models, member._used, member._shard = {1: Model()}, 1, ModelShard(0, 1, 1, 2)  # type: ignore[dict-item]
    member._adapters = {2: Adapter({}, 2)}
    batch = PagedBatch([1], [9], torch.tensor([[4, 2]]), torch.tensor([16]), 8)
    loras = LoraRows([(Adapter({}, number), first, end) for number, first, end in adapters])
    rows = torch.tensor([0])
    packed = pack_step(StepInputs(rows, rows, batch, rows, loras), own_blocks=2, wants_logits=True)
    member._compute(StepArrays(packed, torch.device("cpu")))
    assert [each and each.spans for each in seen] == [[(member._adapters[2], 0, 1)] if adapters else None]
    leader.close()
    link.close()
