"""The time of collectives by the alpha-beta model: T = alpha * hops + bytes / bandwidth, with ring algorithms."""

from __future__ import annotations

from dataclasses import dataclass

from raytide.core.specs.parallelism import AXES, Sizes
from raytide.sizing.devices import Accelerator


@dataclass(frozen=True, slots=True)
class Link:
    """The connection between the ranks of one mesh axis."""

    ranks: int
    bandwidth: float
    """Bytes a second that each rank sends and receives."""
    latency_s: float

    def all_gather(self, whole_bytes: float) -> float:
        """Returns the seconds to gather, or to reduce and scatter, `whole_bytes`: (n-1)/n of them pass each rank."""
        if self.ranks == 1:
            return 0.0
        hops = self.ranks - 1
        return self.latency_s * hops + whole_bytes * hops / self.ranks / self.bandwidth

    def all_reduce(self, nbytes: float) -> float:
        """Returns the seconds to sum `nbytes` on all ranks: a reduce-scatter and an all-gather."""
        return 2.0 * self.all_gather(nbytes)

    def send(self, nbytes: float) -> float:
        return 0.0 if self.ranks == 1 else self.latency_s + nbytes / self.bandwidth


def axis_links(sizes: Sizes, device: Accelerator, devices_per_node: int) -> dict[str, Link]:
    """Returns the link of each axis. Ranks are numbered with the tensor axis innermost, so an axis whose ranks lie
    within a node uses the node's own links.

    An axis that spans nodes is as fast as its ranks' share of the node's network: those of one node work together, and
    the groups of the other ranks share it at the same time.
    """
    links, inside = dict[str, Link](), 1
    for axis in reversed(AXES):
        ranks = getattr(sizes, axis)
        if inside * ranks <= devices_per_node:
            links[axis] = Link(ranks, device.link, device.link_latency_s)
        else:
            together = max(1, devices_per_node // inside)
            bandwidth = min(device.link, device.network * together) if together > 1 else device.network
            links[axis] = Link(ranks, bandwidth, device.network_latency_s)
        inside *= ranks
    joined = Link(
        sizes.shard * sizes.context,
        min(links["shard"].bandwidth, links["context"].bandwidth) if sizes.context > 1 else links["shard"].bandwidth,
        max(links["shard"].latency_s, links["context"].latency_s) if sizes.context > 1 else links["shard"].latency_s,
    )
    return {**links, "shard": joined if sizes.shard * sizes.context > 1 else links["shard"]}
