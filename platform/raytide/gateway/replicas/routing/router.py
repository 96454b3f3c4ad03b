"""Chooses the replica that is expected to produce the first token soonest. The choice uses the replicas' statistics and
the requests that this gateway has sent to them.

The cost of a replica is a number of prefill tokens. It counts the tokens that the request must still compute on the
replica, and the tokens that are queued before the request. A gateway knows its own requests exactly. It learns of
other gateways' requests from the replicas. Each replica pushes its statistics, and the keys of the prefixes that it
received from other gateways. Replicas of about equal cost are ordered by rendezvous hashing (Thaler and Ravishankar
1998). All gateways therefore send a new prefix to the same replica, even before a replica has pushed the prefix's
keys.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from raytide.gateway.replicas.routing.prefix_index import BLOCK_TOKENS, PrefixIndex, prefix_keys, root_key, split_keys

RECOMPUTE_WEIGHT = 3.0
"""The weight of recomputing a cached token, which costs the request itself and those behind it.

The cost is shared among the requests in flight with the same prefix, so that a hot prefix spreads to more replicas.
"""
BEHIND_WEIGHT = 0.25
"""The share of the recomputation cost that each waiting request adds. Where all replicas have queues, total work thus
matters more than balance.
"""
EVICTION_WEIGHT = 1.0
"""The largest weight of evicting a cached token, which each new token does. The weight depends on how much longer the
other replicas would keep such a token.
"""
REQUEST_TOKENS = 32
"""The prefill tokens that a running request counts for: it takes a token of every step and delays a first token by
about as much.
"""
SHORTAGE_WEIGHT = 16.0
"""The weight of tokens without a free KV block. They wait until other requests have ended, which takes longer than
computing them.
"""
SLACK = 0.25
"""The extra wait that is accepted, as a share of the request's own tokens, so that gateways agree on the replica of a
new prefix.
"""
SESSION_TOKENS = 512
"""The tokens by which another replica's cost must be lower before a session moves there."""
MAX_SESSIONS = 1 << 16


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """The last reported state of a replica that takes requests.

    `cache_tokens` is the capacity of the replica's prefix cache in tokens. `block_tokens` is the block size of that
    cache.
    """

    name: str
    running: int = 0
    waiting: int = 0
    free_kv_tokens: float = math.inf
    cache_tokens: int = 0
    block_tokens: int = BLOCK_TOKENS


@dataclass(slots=True)
class _Assigned:
    """The load that this gateway has sent to a replica.

    It consists of the requests without a first token (by their times of use), their tokens, and all requests in flight.
    """

    index: PrefixIndex
    unanswered: set[int] = field(default_factory=set)
    pending_tokens: int = 0
    others_tokens: int = 0
    """The pending tokens of other gateways in the replica's last report."""
    in_flight: set[Route] = field(default_factory=set)
    due: deque[tuple[float, Route]] = field(default_factory=deque)
    """The requests without a first token, each with the time at which that token is late; only if a time to first token
    is promised.
    """
    overdue: int = 0
    """The number of requests in flight whose first token was late."""

    def count_overdue(self, now_s: float) -> None:
        """No longer counts late requests as work that goes before other requests, because replicas first serve requests
        that can still be in time.
        """
        while self.due and (self.due[0][0] < now_s or not self.due[0][1].is_unanswered):
            self.due.popleft()[1].set_overdue()

    def sharing(self, keys: Sequence[bytes], count: int) -> int:
        """Returns how many requests in flight begin with the first `count` blocks of a prompt."""
        if count == 0:
            return 0
        return sum(len(route.keys) >= count and route.keys[count - 1] == keys[count - 1] for route in self.in_flight)


class Route:
    """The assignment of one request to one replica.

    Call `first_token` when the first token arrives, and `end` in every case. Repeated calls have no effect.
    """

    __slots__ = (
        "_assigned",
        "_block_tokens",
        "_is_overdue",
        "_last_uses",
        "_root",
        "_use",
        "cached_tokens",
        "keys",
        "new_tokens",
        "replica",
    )

    def __init__(
        self, replica: ReplicaState, assigned: _Assigned, root: bytes, keys: list[bytes], prompt_tokens: int
    ) -> None:
        matched = assigned.index.match(keys)
        self._root = root
        self.replica, self.keys = replica.name, keys
        self.cached_tokens = matched * BLOCK_TOKENS
        """The prompt tokens that are expected in the replica's cache."""
        self._block_tokens = replica.block_tokens
        self._assigned: _Assigned | None = assigned
        # What is being computed is not cached yet: that it is not found says nothing about older blocks.
        pending = assigned.unanswered
        self._last_uses = [0 if use in pending else use for use in assigned.index.last_uses(keys[:matched])]
        self._use = assigned.index.use(keys)
        self.new_tokens = max(1, prompt_tokens - self.cached_tokens)
        """The other prompt tokens, which must be computed before the first token."""
        assigned.unanswered.add(self._use)
        assigned.pending_tokens += self.new_tokens
        assigned.in_flight.add(self)
        self._is_overdue = False

    @property
    def is_unanswered(self) -> bool:
        return self._assigned is not None and self._use in self._assigned.unanswered

    def first_token(self) -> None:
        if (assigned := self._assigned) is not None and self._use in assigned.unanswered:
            assigned.unanswered.discard(self._use)
            if self._is_overdue:
                assigned.overdue -= 1
            else:
                assigned.pending_tokens -= self.new_tokens

    def set_overdue(self) -> None:
        """Marks the request as overdue, unless it already has its first token. Replicas serve overdue requests after
        all others.
        """
        if (assigned := self._assigned) is not None and self._use in assigned.unanswered:
            self._is_overdue = True
            assigned.overdue += 1
            assigned.pending_tokens -= self.new_tokens

    def end(self, *, cached_tokens: int | None = None, tokens: Sequence[int] = ()) -> None:
        """Ends the request.

        `cached_tokens` is the number of prompt tokens that the replica found in its cache. It corrects the prefix
        index. `tokens` are the tokens of the prompt and the answer. They count as cached from now on.
        """
        assigned = self._assigned
        if assigned is None:
            return
        if self._use in assigned.unanswered:
            assigned.index.undo(self.keys[self.cached_tokens // BLOCK_TOKENS :], self._use)
        self.first_token()
        self._assigned = None
        assigned.in_flight.discard(self)
        if cached_tokens is not None and cached_tokens < self._findable(len(tokens)):
            # The cache is least recently used too: what is older than a block that had left it has left it as well.
            assigned.index.evict_until(self._last_uses[cached_tokens // BLOCK_TOKENS])
            assigned.index.use(self.keys)
        if tokens:
            assigned.index.use(prefix_keys(tokens, self._root, self.keys))

    def _findable(self, most: int) -> int:
        """Returns the number of cached tokens that the replica will find if the index is right: a multiple of the
        replica's own block size.
        """
        return min(self.cached_tokens, most - 1) // self._block_tokens * self._block_tokens


class Router:
    """Routes the requests that one gateway process receives for one endpoint.

    `slo_ttft_s` is the promised time to first token in seconds. It is infinite if the endpoint promises none.
    """

    def __init__(self) -> None:
        self.slo_ttft_s = math.inf
        self._assigned: dict[str, _Assigned] = {}
        self._sessions: OrderedDict[bytes, str] = OrderedDict()
        self._clock = itertools.count()

    def route(
        self,
        prompt: Sequence[int],
        replicas: Sequence[ReplicaState],
        *,
        lora: str | None = None,
        cache_salt: str = "",
        session: str = "",
    ) -> Route:
        """Chooses one of `replicas` for a request and returns the route. The request now counts towards that replica's
        load.

        `replicas` must not be empty.
        """
        root, now_s = root_key(lora, cache_salt), time.monotonic()
        keys = prefix_keys(prompt, root)
        for each in replicas:
            if each.name not in self._assigned:
                self._assigned[each.name] = _Assigned(PrefixIndex(each.cache_tokens // BLOCK_TOKENS, self._clock))
            self._assigned[each.name].count_overdue(now_s)
        chosen = self._cheapest(len(prompt), keys, replicas, root_key(session, lora, cache_salt) if session else b"")
        assigned = self._assigned[chosen.name]
        route = Route(chosen, assigned, root, keys, len(prompt))
        if math.isfinite(self.slo_ttft_s):
            assigned.due.append((now_s + self.slo_ttft_s, route))
        return route

    def add_prefix(self, replica: str, prefix: bytes) -> None:
        """Adds a prefix to the index of a replica. Another gateway has sent this prefix to the replica, so the replica
        has cached it.

        `prefix` is a result of `join_keys`.
        """
        if (assigned := self._assigned.get(replica)) is not None:
            assigned.index.use(split_keys(prefix))

    def add_report(self, replica: str, pending_tokens: int) -> None:
        """Records a replica's report. `pending_tokens` is the number of uncached prompt tokens in those requests on the
        replica that have no first token yet.
        """
        if (assigned := self._assigned.get(replica)) is not None:
            assigned.others_tokens = max(0, pending_tokens - assigned.pending_tokens)

    def forget(self, replica: str) -> None:
        """Drops the prefix index and the load of a replica that has lost its cache."""
        self._assigned.pop(replica, None)

    def _cheapest(
        self, tokens: int, keys: list[bytes], replicas: Sequence[ReplicaState], session: bytes
    ) -> ReplicaState:
        home, costs = self._sessions.get(session) if session else None, {}
        matches = {each.name: self._assigned[each.name].index.match(keys) for each in replicas}
        known = max(matches.values())
        sharing = max(
            self._assigned[name].sharing(keys, known) for name, matched in matches.items() if matched == known
        )
        behind = min(max(each.waiting, len(self._assigned[each.name].unanswered)) for each in replicas)
        weight = RECOMPUTE_WEIGHT * (1 + BEHIND_WEIGHT * behind) / (1 + sharing)
        now = next(self._clock)
        oldest = {each.name: self._assigned[each.name].index.oldest_use() or 0 for each in replicas}
        lifetime = now - min(oldest.values()) + 1
        for each in replicas:
            matched = matches[each.name]
            uncached = tokens - matched * BLOCK_TOKENS
            credit = max(SESSION_TOKENS, RECOMPUTE_WEIGHT * uncached) if each.name == home else 0.0
            evicting = EVICTION_WEIGHT * (1 - (now - oldest[each.name] + 1) / lifetime)
            missing = weight * (known - matched) * BLOCK_TOKENS
            costs[each.name] = self._queue(each, uncached) + missing + evicting * uncached - credit
        most = min(costs.values()) + SLACK * (tokens - known * BLOCK_TOKENS)
        alike = [each for each in replicas if costs[each.name] <= most]
        # The first block that no replica has: what many prompts begin with does not bind them together.
        salt = session or (keys[known] if known < len(keys) else b"%d" % now)
        chosen = max(alike, key=lambda each: (each.name == home, root_key(salt.hex(), each.name)))
        if session:
            self._sessions[session] = chosen.name
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return chosen

    def _queue(self, replica: ReplicaState, tokens: int) -> float:
        """Returns the number of tokens that the replica computes before a request that still needs `tokens`."""
        own = self._assigned[replica.name]
        held = max(replica.running + replica.waiting, len(own.in_flight)) - own.overdue
        shortage = max(0.0, own.pending_tokens + tokens - replica.free_kv_tokens)
        queue = own.pending_tokens + own.others_tokens + REQUEST_TOKENS * held
        return queue + SHORTAGE_WEIGHT * shortage
