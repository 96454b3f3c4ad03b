"""A checkpoint continues the same run on any layout, and bit for bit on the one that wrote it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.actors.trainer.checkpoint_ranks import Phase, Reached, phases

from raytide.core.specs.parallelism import Parallelism
from raytide.core.specs.train import TrainSpec

RunRanks = Callable[..., list[Any]]
END = 9
"""Past the last step: no pause."""


def test_any_layout_goes_on_with_what_any_other_wrote(spec: TrainSpec, run_ranks: RunRanks) -> None:
    model = spec.model.model_copy(update={"layers": 4})
    spec = spec.model_copy(update={"checkpoint_every": 4, "steps": 8, "model": model})
    v_shaped = Parallelism(pipeline=2, schedule="zbv_zero_bubble")
    plan = [
        Phase("whole", 4, END),
        Phase("same", 4, END, after=("whole", 4)),
        Phase("4 to 1", 1, END, after=("whole", 4)),
        Phase("4 to 2", 2, END, after=("whole", 4)),
        Phase("4 to tensor", 4, 5, after=("whole", 4), layout=Parallelism(tensor=2)),
        Phase("tensor to pipeline", 2, 6, after=("4 to tensor", 5), layout=Parallelism(pipeline=2)),
        Phase("pipeline to v", 2, 7, after=("tensor to pipeline", 6), layout=v_shaped),
        Phase("v to 1", 1, END, after=("pipeline to v", 7)),
        Phase("one", 1, 4),
        Phase("1 to 4", 4, END, after=("one", 4)),
    ]
    for mine in run_ranks(4, phases, spec, plan):
        whole = mine[0]
        assert bit_equal(mine[1], whole)
        for phase, reached in zip(plan[1:], mine[1:], strict=True):
            if phase.after is not None and reached is not None:
                assert (reached.source, reached.began) == ("storage", phase.after[1])
                expected = whole.losses[reached.began : phase.until]
                assert reached.losses == pytest.approx(expected, abs=5e-6, rel=0), phase.out


def bit_equal(resumed: Reached, whole: Reached) -> bool:
    return resumed.losses == whole.losses[4:] and resumed.state == whole.state
