"""The base class of config files and specs, and the functions through which raytide reads its environment variables."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from raytide.core import bounds
from raytide.core.errors import ConfigError


class Config(BaseModel):
    """A frozen pydantic model. An unknown key raises an error that names the closest known key.

    Numbers must be finite. Texts have a maximum length. Because of this limit, pydantic also rejects lone surrogates.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        str_max_length=bounds.MOST_CHARS,
        defer_build=True,  # a validator is built when it is first used: commands load every spec and use few
    )

    most_bytes: ClassVar[int] = bounds.MOST_SPEC_BYTES
    """The largest input of `parse`; higher for files that raytide writes itself."""

    @classmethod
    def parse(cls, data: Mapping[str, object], *, where: str) -> Self:
        """Validates the data and returns the model. Raises one ConfigError that names all bad fields. `where` names the
        input in that error."""
        if problem := bounds.problem_of(data, cls.most_bytes):
            raise ConfigError(f"{bounds.printable(where, 200)}: {problem}.", hint="Reduce or remove it.")
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            problems = "; ".join(_describe(error, cls))
            raise ConfigError(
                bounds.printable(f"{where}: {problems}."), hint="Correct these keys and try again."
            ) from None


def load_yaml(path: Path | str) -> dict[str, object]:
    """Returns the top-level mapping of a YAML file. Raises ConfigError if the file cannot be read or parsed."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.", hint="Check the path.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: byte {error.start} is wrong.", hint="Save it as UTF-8.") from None
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:  # such as a date that does not exist
        raise ConfigError(f"{path} is not valid YAML: {error}", hint="Correct the file.") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} has no mapping at the top level.", hint="Start from the shipped example.")
    return data


def home() -> Path:
    """Returns the folder that contains the clusters' run folders: RAYTIDE_HOME if it is set, else ~/.raytide."""
    return Path(os.environ.get("RAYTIDE_HOME") or Path.home() / ".raytide")


def environment(name: str) -> str | None:
    """Returns the value of the environment variable RAYTIDE_<name>, or None if it is unset or empty."""
    return os.environ.get(f"RAYTIDE_{name}") or None


def installed_version(package: str) -> str | None:
    """Returns the version of an installed Python package, or None if the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def raytide_version() -> str:
    return installed_version("raytide") or "0+checkout"


def _describe(error: ValidationError, cls: type[BaseModel]) -> list[str]:
    lines = []
    for item in error.errors(include_url=False):
        field = ".".join(str(part) for part in item["loc"]) or "(top level)"
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(item["loc"][-1]), _known_keys(cls), n=1)
            lines.append(f"unknown key {field}" + (f" (did you mean {near[0]}?)" if near else ""))
        else:
            lines.append(f"{field}: {item['msg'].removeprefix('Value error, ').rstrip('.')}")
    return lines


def _known_keys(cls: type[BaseModel], seen: frozenset[type] = frozenset()) -> list[str]:
    keys: list[str] = []
    for name, field in cls.model_fields.items():
        keys.append(field.alias or name)
        for inner in _models_in(field.annotation):
            if inner not in seen:
                keys += _known_keys(inner, seen | {cls})
    return keys


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arg in getattr(annotation, "__args__", ()) for model in _models_in(arg)]
