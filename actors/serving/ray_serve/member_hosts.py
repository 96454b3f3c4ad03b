"""The other members of a replica that spans nodes: an actor in each other bundle of its placement group owns the
processes that compute there. They end with the replica.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raytide.actors.engine.model.parallel.launcher import Invitation, LocalMembers
from raytide.actors.models.model_cache import staged_model
from raytide.core.errors import EngineError
from raytide.core.objects.endpoint import ServeSpec

_START_TIMEOUT_S = 600.0
"""The time for the start of the actors, which copy the model to their nodes first."""


class MemberHost:
    """Starts one node's members."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._members: LocalMembers | None = None

    def start(self, invitation: Invitation, index: int, local_size: int, cpus: float) -> None:
        """Starts the members of the replica's bundle `index`; they connect to the leader by themselves."""
        model_dir = staged_model(self._model, lambda *_: None).path
        self._members = LocalMembers(
            range(index * local_size, (index + 1) * local_size),
            local_size=local_size,
            host=ray.util.get_node_ip_address(),
            threads=max(1, int(cpus) // local_size),
            model_dir=model_dir,
        )
        self._members.launch(invitation)


class MemberHosts:
    """The actors of one replica, which live as long as this object."""

    def __init__(self, spec: ServeSpec, options: dict[str, Any]) -> None:
        self._spec, self._options = spec, options
        self._actors: list[Any] = []

    async def bring(self, invitation: Invitation) -> None:
        """Starts the members of all other bundles. Raises EngineError when one cannot start."""
        group = ray.util.get_current_placement_group()
        if group is None:
            raise EngineError("a replica of several members has no placement group.", hint="Deploy the endpoint again.")
        spec, starts = self._spec, list[Any]()
        local_size = invitation.size // spec.members
        for index in range(1, spec.members):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            actor: Any = (
                ray.remote(MemberHost).options(**self._options, scheduling_strategy=strategy).remote(spec.model)
            )
            self._actors.append(actor)
            starts.append(actor.start.remote(invitation, index, local_size, spec.resources.get("CPU", 0.0)))
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await asyncio.gather(*starts)
        except (TimeoutError, ray.exceptions.RayError) as error:
            raise EngineError(
                f"the members of a replica of endpoint {spec.name} did not start: {error}.", hint="See their nodes."
            ) from None
