"""Keeps the weights that a replica serves those of its endpoint's spec, while it runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping

from raytide.actors.engine.base import Engine
from raytide.actors.models.model_cache import StagedModel, staged_model
from raytide.core.errors import EngineDeadError, RaytideError

RETRY_S = 30.0
"""The time after which a swap that failed is tried again."""


def is_its_turn(replica: str, wanted: str, serving: Mapping[str, str], replicas: Collection[str]) -> bool:
    """Returns whether a replica may swap: all `replicas` before it, by their ids, serve the wanted weights.

    So they swap one after the other, and after a failure no further one does. `serving` has the location of the weights
    of each replica that has reported some.
    """
    return all(serving.get(other) == wanted for other in replicas if other < replica)


class WeightsSync:
    """Swaps the weights of one engine. A swap that fails leaves those that it had."""

    def __init__(
        self,
        engine: Engine,
        model_dir: str,
        *,
        stage: Callable[[str], StagedModel] = staged_model,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`model_dir` is the directory of the spec's model, with which the engine has started."""
        self._engine, self._model_dir, self._stage, self._now_s = engine, model_dir, stage, now_s
        self._staged = StagedModel(model_dir)
        self._failed_s = -RETRY_S
        self.location = ""
        """The location of the weights that it serves; "" for those of the spec's model."""
        self.asked = ""
        """The location of those that were wanted last."""
        self.error = ""
        """The error of their swap."""

    async def sync(self, wanted: str) -> None:
        """Swaps to the weights at a location, unless that has just failed. Requests that run continue with them."""
        if wanted != self.asked:
            self.asked, self.error, self._failed_s = wanted, "", -RETRY_S
        if wanted == self.location or self._now_s() - self._failed_s < RETRY_S:
            return
        staged = StagedModel(self._model_dir)
        try:
            if wanted:
                staged = await asyncio.to_thread(self._stage, wanted)
            await self._engine.load_weights(staged.path)
        except RaytideError as error:
            staged.close()
            if isinstance(error, EngineDeadError):
                raise
            self.error, self._failed_s = str(error), self._now_s()
            return
        before, self._staged = self._staged, staged
        before.close()
        self.location, self.error = wanted, ""
