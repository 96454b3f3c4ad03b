"""The best model to train for a budget, according to several scaling laws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytide.core.errors import CapacityError
from raytide.core.money import MICRO
from raytide.core.objects.node import NodeType
from raytide.sizing.devices import device_of
from raytide.sizing.scaling.laws import BESIROGLU, HOFFMANN, approach_1, approach_2, over_trained, repeated_optimum

ASSUMED_MFU = 0.35
"""The utilization with which dollars are converted to FLOPs before a model is known; published runs have 0.3 to 0.5."""


@dataclass(frozen=True, slots=True)
class ModelAdvice:
    """A model size and a number of training tokens, with the scaling law that recommends them. `loss` is None if the
    law predicts no loss.
    """

    by: str
    parameters: float
    tokens: float
    loss: float | None

    def json(self) -> dict[str, object]:
        return {"by": self.by, "parameters": self.parameters, "tokens": self.tokens, "loss": self.loss}

    def cells(self) -> tuple[str, ...]:
        ratio = f"{self.tokens / self.parameters:.1f}"
        loss = "-" if self.loss is None else f"{self.loss:.4f}"
        return self.by, f"{self.parameters:.3g}", f"{self.tokens:.3g}", ratio, loss


def advise(flops: float, served_tokens: float = 0.0, unique_tokens: float | None = None) -> list[ModelAdvice]:
    """Returns the optimum of each scaling law for `flops`, the default law first.

    If `served_tokens` is not 0, the result also includes a model with the same loss as the default law's optimum.
    Among the models with this loss, it costs the least for training plus serving `served_tokens` tokens. If
    `unique_tokens` is set, the result also includes the best model that can be trained if only `unique_tokens`
    different tokens exist.
    """
    optima = [(law.name, law.optimum(flops)) for law in (BESIROGLU, HOFFMANN)]
    found = [ModelAdvice(name, best.parameters, best.tokens, best.loss) for name, best in optima]
    for name, approach in (("Hoffmann 2022, approach 1", approach_1), ("Hoffmann 2022, approach 2", approach_2)):
        parameters, tokens = approach(flops)
        found.append(ModelAdvice(name, parameters, tokens, None))
    if served_tokens:
        small = over_trained(flops, served_tokens)
        name = f"Sardana 2023, {served_tokens:.3g} tokens served"
        found.append(ModelAdvice(name, small.parameters, small.tokens, small.loss))
    if unique_tokens is not None:
        again = repeated_optimum(flops, unique_tokens)
        name = f"Muennighoff 2023, {again.epochs:.1f} epochs"
        found.append(ModelAdvice(name, again.parameters, again.tokens, again.loss))
    return found


def flops_of_budget(usd: float, node_types: Sequence[NodeType], hours: float | None = None) -> float:
    """Returns how many model FLOPs the budget `usd` buys at 35 % utilization. The budget is spent on a single node
    type: the one that does the most FLOPs for it.

    With `hours`, the FLOPs of a node type are limited to what all of its nodes can do in this time. Raises
    CapacityError if no node type has both a price and known GPUs.
    """
    found: list[float] = []
    for node_type in node_types:
        device = device_of(node_type)
        if device is None or device.is_cpu or not node_type.price_micro_usd_h:
            continue
        node_h = usd / (node_type.price_micro_usd_h / MICRO)
        if hours is not None:
            node_h = min(node_h, hours * node_type.max_nodes)
        found.append(node_h * 3600.0 * node_type.resources["GPU"] * device.peak_flops("bf16") * ASSUMED_MFU)
    if not found:
        raise CapacityError("no node type has a price and GPUs that the planner knows.", hint="Give --flops instead.")
    return max(found)
