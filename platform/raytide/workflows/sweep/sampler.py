"""Draws the parameters of a trial with Optuna, as a pure function of the earlier trials and the seed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytide.workflows.sweep.spec import SweepSpec, Value, ValueRange

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial


@dataclass(frozen=True, slots=True)
class PastTrial:
    """A trial that has ended, in the form in which the sampler learns from it."""

    params: Mapping[str, Value]
    value: float
    """Its metric at `step`. The sampler leaves out trials whose value is not finite."""
    step: int
    is_whole: bool
    """False for a trial that was ended early."""


def suggest(sweep: SweepSpec, number: int, past: Sequence[PastTrial]) -> dict[str, Value]:
    """Returns the parameters of the trial `number` (from 0). The same arguments always give the same parameters.

    A trial that was ended early counts as a pruned trial of Optuna. Such trials are ranked by the last rung that
    they reached, and then by their value at that rung.
    """
    if sweep.sampler == "grid":
        return _of_grid(sweep, number)
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(direction="minimize", sampler=_sampler(sweep, number))
        space = {name: _distribution(values) for name, values in sweep.space.items()}
        study.add_trials([_frozen(trial, space, sweep) for trial in past if math.isfinite(trial.value)])
        drawn = study.ask(space).params
    return {name: drawn[name] for name in sweep.space}


def _of_grid(sweep: SweepSpec, number: int) -> dict[str, Value]:
    """Returns point `number` of the grid, in which the last parameter varies fastest; after the last point the grid
    starts again.
    """
    point: dict[str, Value] = {}
    for name, values in reversed(sweep.space.items()):
        assert values.choices is not None  # the spec requires them
        number, at = divmod(number, len(values.choices))
        point[name] = values.choices[at]
    return {name: point[name] for name in sweep.space}


def _sampler(sweep: SweepSpec, number: int) -> BaseSampler:
    import optuna

    seed = (sweep.seed * 1_000_003 + number) % 2**32  # another one for each trial, or random draws would be equal
    if sweep.sampler == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(10, max(2, sweep.trials // 3)))


def _distribution(values: ValueRange) -> BaseDistribution:
    import optuna

    if values.choices is not None:
        return optuna.distributions.CategoricalDistribution(values.choices)
    assert values.low is not None
    assert values.high is not None
    if isinstance(values.low, int) and isinstance(values.high, int):
        return optuna.distributions.IntDistribution(values.low, values.high, log=values.log)
    return optuna.distributions.FloatDistribution(values.low, values.high, log=values.log)


def _frozen(trial: PastTrial, space: Mapping[str, BaseDistribution], sweep: SweepSpec) -> FrozenTrial:
    import optuna

    value = trial.value if sweep.mode == "min" else -trial.value
    if trial.is_whole:
        return optuna.trial.create_trial(params=dict(trial.params), distributions=dict(space), value=value)
    return optuna.trial.create_trial(
        params=dict(trial.params),
        distributions=dict(space),
        state=optuna.trial.TrialState.PRUNED,
        intermediate_values={trial.step: value},
    )
