"""The connection of leader and member: strangers are refused, steps arrive whole, an end is noticed."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from raytide.actors.engine.model.input_batch import StepInputs
from raytide.actors.engine.model.lora import Adapter, LoraRows
from raytide.actors.engine.model.parallel.link import MemberLink, StepArrays, pack_step, watch
from raytide.kernels.core import PagedBatch


def connected(leader_secret: str, member_secret: str) -> tuple[MemberLink, MemberLink]:
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as thread:
        port = listening.getsockname()[1]
        member = thread.submit(MemberLink.connect, "127.0.0.1", port, member_secret, 3)
        connection, _ = listening.accept()
        try:
            leader = MemberLink.accept(connection, leader_secret)
        except ValueError:
            connection.close()
            member.exception(60)
            raise
        return leader, member.result(60)


def test_a_stranger_without_the_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="without the secret"):
        connected("right", "wrong")


@pytest.mark.parametrize("adapters", [[], [(2, 0, 1), (7, 1, 4)]])
def test_a_step_arrives_as_it_was_sent(adapters: list[tuple[int, int, int]]) -> None:
    leader, member = connected("s", "s")
    assert leader.rank == member.rank == 3
    batch = PagedBatch([1, 3], [9, 3], torch.tensor([[4, 2], [7, 0]]), torch.tensor([40, 56, 57, 58]), 8)
    ids, positions, rows = torch.tensor([5, 6, 7, 8]), torch.tensor([8, 0, 1, 2]), torch.tensor([0, 3])
    loras = LoraRows([(Adapter({}, number), first, end) for number, first, end in adapters])
    sent_step = StepInputs(ids, positions, batch, rows, loras if adapters else None)
    leader.send_step(pack_step(sent_step, own_blocks=5, wants_logits=False))
    leader.send({"use": 2})
    message = member.receive()
    assert not isinstance(message, dict)
    step = StepArrays(message, torch.device("cpu"))
    assert step.adapters == adapters
    found_batch = step.inputs.batch
    assert (step.own_blocks, step.wants_logits, found_batch.block_size) == (5, False, 8)
    assert (found_batch.query_lens, found_batch.context_lens) == ([1, 3], [9, 3])
    for found, sent in (
        (step.inputs.ids_T, ids),
        (step.inputs.positions_T, positions),
        (step.inputs.rows_R, rows),
        (found_batch.slots_T, batch.slots_T),
        (found_batch.block_tables_BM, batch.block_tables_BM),
    ):
        assert torch.equal(found, sent)
    assert member.receive() == {"use": 2}
    leader.close()
    member.close()


def test_the_end_of_the_other_side_is_noticed_while_nobody_reads() -> None:
    leader, member = connected("s", "s")
    ended, which = threading.Event(), list[int]()
    watch([leader.fileno()], lambda index: (which.append(index), ended.set()))
    member.send({"unread": 1})
    member.close()
    assert ended.wait(60)
    assert which == [0]
    leader.close()
