"""Selects the linear modules to quantise, by their names in the files, and checks the group size for them."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch

from raytide.actors.models.architecture import Architecture
from raytide.actors.models.naming import NAMES, projections
from raytide.core.errors import ConfigError

QAT_RECORD = "raytide_qat.json"
"""The file in an exported directory that names the scheme for which its weights were trained."""


def quantized_linears(arch: Architecture, root: str, skip: tuple[str, ...]) -> set[str]:
    """Returns the names of the modules to quantise, which are the projections of the layers. The output head,
    embeddings, routers and experts are not quantised.

    Raises ConfigError for a family whose weights have no quantised format.
    """
    names = NAMES[arch.names]
    if names.transposed:
        raise ConfigError("GPT-2's transposed layers have no quantised format.", hint="Use another family.")
    return {
        module
        for index in range(arch.num_layers)
        for projection in projections(arch, index).values()
        for module in (root + names.layer.format(index) + path for path in projection.paths)
        if not any(fnmatch(module, pattern) for pattern in skip)
    }


def expert_patterns(arch: Architecture) -> list[str]:
    """Returns patterns, in compressed-tensors' syntax, that match a model's routers and experts."""
    return ["re:.*mlp\\.gate$", "re:.*\\.experts\\..*", "re:.*block_sparse_moe.*"] if arch.experts else []


def check_groups(group: int | None, shape: Callable[[str], tuple[int, ...]], linears: set[str]) -> None:
    """Raises ConfigError if no module is left to quantise, or if the group size does not divide the number of a
    module's inputs.
    """
    if not linears:
        raise ConfigError("skip leaves no layer to quantise.", hint="Skip fewer layers.")
    if group is None:
        return
    for module in sorted(linears):
        inputs = shape(f"{module}.weight")[1]
        if inputs % group:
            fitting = [each for each in (16, 32, 64, 128, 256) if inputs % each == 0]
            raise ConfigError(
                f"a group of {group} does not divide the {inputs} inputs of {module}.",
                hint=f"Choose {', '.join(map(str, fitting)) or 'no group'}, or skip the layer.",
            )
