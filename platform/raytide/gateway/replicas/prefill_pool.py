"""Chooses the replica of another endpoint that computes a long prompt, so that no decoding waits for it."""

from __future__ import annotations

from dataclasses import dataclass

from raytide.actors.engine.types import GenRequest
from raytide.gateway.replicas.replica_set import Replica, ReplicaSet
from raytide.gateway.replicas.routing.router import Route


@dataclass(frozen=True, slots=True)
class PrefillPool:
    """The replicas of another endpoint with the same model, and the minimum number of prompt tokens for which they are
    used.
    """

    replicas: ReplicaSet
    min_tokens: int

    def route(self, request: GenRequest, replica: Replica, cached_tokens: int) -> Route | None:
        """Returns the route for computing a request's prompt; None if `replica`, which decodes the request, should
        compute the prompt itself.

        The replica should do so if its cache lacks only little of the prompt, or if the request cannot be handed over:
        it has several samples, wants log probabilities of the prompt, or continues an interrupted stream.
        """
        params = request.sampling
        if len(request.prompt) - cached_tokens < self.min_tokens or isinstance(request.prompt, str):
            return None
        if request.resume or params.num_samples > 1 or params.prompt_logprobs is not None or params.max_tokens == 1:
            return None
        ready = [each for each in self.replicas.ready if each.has_adapter(request.lora) and _hands_over(each, replica)]
        if not ready:
            return None
        return self.replicas.router.route(
            request.prompt,
            [each.routing_state() for each in ready],
            lora=request.lora,
            cache_salt=request.salt,
            session=request.session,
        )

    def address(self, route: Route) -> tuple[str, int, str, str] | None:
        """Returns the host, port, secret and name of the route's replica; None if the replica has gone."""
        address = self.replicas.address(route.replica)
        return None if address is None else (address.host, address.port, address.secret, route.replica)


def _hands_over(sender: Replica, receiver: Replica) -> bool:
    return all("handover" in each.info.features for each in (sender, receiver)) and (
        sender.info.weights_version == receiver.info.weights_version
    )
