"""A member answers orders that may fail, and says why they did."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.actors.engine.model.parallel.test_link import connected
from tests.actors.engine.tiny import save_llama

from raytide.actors.engine.model.parallel.member import GroupMember

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
