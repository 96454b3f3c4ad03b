"""The rollouts of endpoints in the SDK: the options of `serve` for them, and their state."""

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
    """Returns a RolloutSpec as JSON; None if no kind of rollout is given. Raises UsageError if several are.

    `canary` is True for the default steps, or a CanarySpec, or its fields, which may include the rollout's
    `ready_within_s`. `shadow` is a percentage; `ab` is a percentage or has the fields of an AbTestSpec.
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
