"""Orders the stages of a flow by their dependencies. Reports cycles, and references to names that do not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

from raytide.core.errors import ConfigError
from raytide.workflows.references import METRICS, PARAMS, Reference, references_in
from raytide.workflows.spec import FlowSpec, StageSpec

OUTPUTS: Mapping[str, tuple[str, ...]] = {
    "data": ("out",),
    "train": ("out", "model", "job"),
    "compress": ("out", "model", "job"),
    "eval": ("out", "job"),
    "register": ("reference", "version"),
    "serve": ("name", "url"),
    "script": ("out", "job"),
}
"""The outputs of each kind of stage, besides `metrics.NAME`."""


def needs_of(stage: StageSpec) -> tuple[str, ...]:
    """Returns the names of the stages that must be done before this stage, in the order in which the stage's spec names
    them.
    """
    named = [reference.stage for reference in references_in(stage.spec) if reference.stage != PARAMS]
    judged = [name for condition in stage.conditions for name in condition.stages]
    return tuple(dict.fromkeys([*named, *judged, *stage.needs]))


def order_of(flow: FlowSpec) -> tuple[str, ...]:
    """Returns the stages in an order in which every stage comes after the stages that it needs.

    The stages that need no other stage come first. Next come the stages that need only stages of this first group,
    and so on. Each group keeps the order of the file.

    Raises ConfigError if stages need each other in a cycle, or if a stage refers to something that does not exist.
    The message names the cycle or the reference.
    """
    for name, stage in flow.stages.items():
        _check_references(flow, name, stage)
    sorter: TopologicalSorter[str] = TopologicalSorter({name: needs_of(stage) for name, stage in flow.stages.items()})
    try:
        sorter.prepare()
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise ConfigError(
            f"{flow.name}: its stages need each other in a circle: {circle}.", hint="Remove one of these references."
        ) from None
    place, order = {name: at for at, name in enumerate(flow.stages)}, list[str]()
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=place.__getitem__)
        order += ready
        sorter.done(*ready)
    return tuple(order)


def _check_references(flow: FlowSpec, name: str, stage: StageSpec) -> None:
    where = f"{flow.name}: stage {name}"
    try:
        references = list(references_in(stage.spec))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}.", hint="Correct it; a shell's variables are written $NAME.") from None
    for reference in references:
        if reference.stage == PARAMS:
            _check_known(reference.name, flow.params, f"{where}: {reference}: there is no parameter {reference.name}")
        else:
            _check_known(reference.stage, flow.stages, f"{where}: {reference}: there is no stage {reference.stage}")
            _check_output(reference, flow.stages[reference.stage], where)
    for needed in (*stage.needs, *(other for condition in stage.conditions for other in condition.stages)):
        _check_known(needed, flow.stages, f"{where} needs {needed}, and there is no stage {needed}")


def _check_output(reference: Reference, stage: StageSpec, where: str) -> None:
    if reference.name.startswith(f"{METRICS}."):
        return
    outputs = OUTPUTS[stage.kind]
    _check_known(
        reference.name,
        (*outputs, f"{METRICS}.NAME"),
        f"{where}: {reference}: a {stage.kind} stage has no output {reference.name}",
    )


def _check_known(name: str, known: Iterable[str], problem: str) -> None:
    names = list(known)
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(names) or 'none'}."
    raise ConfigError(f"{problem}.", hint=hint)
