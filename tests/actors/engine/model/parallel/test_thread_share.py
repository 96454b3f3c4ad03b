"""The threads of a process in which several groups of members have their leaders."""

from __future__ import annotations

import torch

from raytide.actors.engine.model.parallel.leader import ThreadShare


def test_groups_give_their_threads_back_in_any_order() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        first, second = ThreadShare(2), ThreadShare(2)
        assert torch.get_num_threads() == 2
        first.close()
        assert torch.get_num_threads() == 4
        for _ in range(2):
            second.close()
            assert torch.get_num_threads() == 8
    finally:
        torch.set_num_threads(before)
