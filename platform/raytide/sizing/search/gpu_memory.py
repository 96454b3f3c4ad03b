"""GPU memory as a resource of shapes: "GPUs with 40 GB each" becomes a selector of the node types that have them."""

from __future__ import annotations

from collections.abc import Sequence

from raytide.core.errors import CapacityError
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.node import TYPE_LABEL, NodeType, labels_match
from raytide.sizing.devices import gpu_memory_gb


def select_gpu_memory(gang: GangSpec, node_types: Sequence[NodeType], *, subject: str) -> GangSpec:
    """Returns the gang with `gpu_memory_gb` of each shape replaced by a label. Raises CapacityError if no node type
    that a shape's other labels allow has GPUs with that much."""
    if all(shape.gpu_memory_gb is None for shape in gang.shapes):
        return gang
    shapes = tuple(_selected(shape, node_types, subject) for shape in gang.shapes)
    return gang.model_copy(update={"shapes": shapes})


def _selected(shape: Shape, node_types: Sequence[NodeType], subject: str) -> Shape:
    if shape.gpu_memory_gb is None:
        return shape
    allowed = [each for each in node_types if any(labels_match(shape.labels, each.all_labels(z)) for z in each.zones)]
    known = {each.name: memory for each in allowed if (memory := gpu_memory_gb(each)) is not None}
    enough = sorted(name for name, memory in known.items() if memory >= shape.gpu_memory_gb)
    if not enough:
        most = max(known.values(), default=0.0)
        has = f"the largest have {most:g} GB" if known else "none has GPUs of known memory"
        raise CapacityError(
            f"no node type fits {subject}: needs GPUs with {shape.gpu_memory_gb:g} GB; {has}.",
            hint="Ask for less, add a node type, or declare gpu_memory_gb in metadata.raytide.node_types.",
        )
    wanted = enough[0] if len(enough) == 1 else f"in({','.join(enough)})"
    return shape.model_copy(update={"labels": {**shape.labels, TYPE_LABEL: wanted}, "gpu_memory_gb": None})
