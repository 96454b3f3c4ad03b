"""Rollouts of endpoints in the SDK: builds the spec of a rollout from the options of `serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raytide.core.errors import UsageError
from raytide.registry.rollout.canary import CanarySpec


def rollout_of(
    canary: bool | Mapping[str, Any] | CanarySpec = False,
    shadow: float | None = None,
    ab: float | Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Returns the fields of a RolloutSpec. Returns None if no kind of rollout is given. Raises UsageError if several
    kinds are given.

    `canary` is True for the default steps, a CanarySpec, or a mapping with its fields and the rollout's
    `ready_within_s`. `shadow` is a percentage. `ab` is a percentage or a mapping with the fields of an AbTestSpec.
    """
    asked: dict[str, Any] = {}
    common: dict[str, Any] = {}
    if canary is not False:
        fields = canary.model_dump(mode="json") if isinstance(canary, CanarySpec) else canary
        fields = {} if fields is True else dict(fields)
        if "ready_within_s" in fields:
            common["ready_within_s"] = fields.pop("ready_within_s")
        asked["canary"] = fields
    if shadow is not None:
        asked["shadow"] = {"percent": shadow}
    if ab is not None:
        asked["ab"] = dict(ab) if isinstance(ab, Mapping) else {"percent": ab}
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)} cannot be combined.", hint="Choose one.")
    return {**asked, **common} if asked else None
