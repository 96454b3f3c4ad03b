"""Parameters of trials depend on the seed, the number and the trials before, on nothing else."""

from __future__ import annotations

import math

import pytest

from raytide.workflows.sweep.sampler import PastTrial, suggest
from raytide.workflows.sweep.spec import SweepSpec

SPACE = {
    "optim.lr": {"low": 1e-4, "high": 1e-1, "log": True},
    "model.layers": {"low": 1, "high": 8},
    "optim.name": {"choices": ["adamw", "muon"]},
}


def sweep_of(**fields: object) -> SweepSpec:
    return SweepSpec.parse({"space": SPACE, "trials": 12, **fields}, where="sweep")


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_the_same_history_gives_the_same_parameters_within_their_ranges(sampler: str) -> None:
    sweep = sweep_of(sampler=sampler)
    drawn = [suggest(sweep, number, ()) for number in range(8)]
    assert drawn == [suggest(sweep, number, ()) for number in range(8)]
    assert len({str(each) for each in drawn}) == 8
    for each in drawn:
        assert 1e-4 <= float(each["optim.lr"]) <= 1e-1
        assert each["model.layers"] in range(1, 9)
        assert each["optim.name"] in ("adamw", "muon")
    assert drawn != [suggest(sweep_of(sampler=sampler, seed=1), number, ()) for number in range(8)]


def test_tpe_draws_where_trials_did_well() -> None:
    """The loss is least at a rate of 1e-2: later trials lie nearer to it, by logarithm, than random ones."""
    space = {"lr": {"low": 1e-6, "high": 1e2, "log": True}}

    def distances(sampler: str) -> list[float]:
        sweep = SweepSpec.parse({"space": space, "trials": 40, "sampler": sampler}, where="sweep")
        past: list[PastTrial] = []
        for number in range(40):
            params = suggest(sweep, number, past)
            away = abs(math.log10(float(params["lr"])) + 2)
            past.append(PastTrial(params, away, 10, is_whole=number % 3 == 0))
        return [trial.value for trial in past[20:]]

    assert sum(distances("tpe")) < 0.6 * sum(distances("random"))


def test_a_trial_without_a_value_teaches_nothing() -> None:
    sweep = sweep_of()
    lost = PastTrial(suggest(sweep, 0, ()), math.nan, 0, is_whole=False)
    assert suggest(sweep, 1, [lost]) == suggest(sweep, 1, ())


def test_a_grid_has_every_point_once() -> None:
    space = {"a": {"choices": [1, 2]}, "b": {"choices": ["x", "y", "z"]}}
    sweep = SweepSpec.parse({"space": space, "trials": 6, "sampler": "grid"}, where="sweep")
    points = [suggest(sweep, number, ()) for number in range(6)]
    assert points[:3] == [{"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 1, "b": "z"}]
    assert len({str(point) for point in points}) == 6
