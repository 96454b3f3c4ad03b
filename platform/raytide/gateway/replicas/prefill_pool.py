"""Chooses a replica of another endpoint to compute a long prompt, so that the prompt does not delay decoding."""

from __future__ import annotations

from dataclasses import dataclass

from raytide.actors.engine.types import GenRequest
from raytide.gateway.replicas.replica_set import Replica, ReplicaSet
from raytide.gateway.replicas.routing.router import Route


@dataclass(frozen=True, slots=True)
class PrefillPool:
    """The replicas of another endpoint that compute long prompts for this endpoint. Both endpoints serve the same
    model.

    `min_tokens` is the least number of uncached prompt tokens for which the pool is used.
    """

    replicas: ReplicaSet
    min_tokens: int

    def route(self, request: GenRequest, replica: Replica, cached_tokens: int) -> Route | None:
        """Returns the route to the replica that computes the request's prompt. `replica` is the replica that decodes
        the request.

        Returns None if `replica` should compute the prompt itself, for one of these reasons:
        - Fewer than `min_tokens` tokens of the prompt are missing from the cache of `replica`.
        - The KV cache of this request cannot be handed over: the request has several samples, wants log
          probabilities of the prompt, generates a single token, or continues an interrupted stream.
        - No replica of the pool can hand over to `replica`.
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
        """Returns the host, port, secret and name of the route's replica. Returns None if the replica no longer
        exists.
        """
        address = self.replicas.address(route.replica)
        return None if address is None else (address.host, address.port, address.secret, route.replica)


def _hands_over(sender: Replica, receiver: Replica) -> bool:
    return all("handover" in each.info.features for each in (sender, receiver)) and (
        sender.info.weights_version == receiver.info.weights_version
    )
