"""A model of what the KV memory holds, and a fake language model over it, to run the scheduler and its pool against.

Each slot holds what it was computed from: salt, version of the weights, and all tokens up to its own. So a block that
is shared by mistake, moved too late or offered too early is seen as soon as somebody reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile

from raytide.actors.engine.kv_cache.block_pool import BlockPool, chain_hash
from raytide.actors.engine.kv_cache.disk_tier import DiskRead
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.scheduler.scheduler import Scheduler
from raytide.actors.engine.sequence import ScheduledChunk, Sequence, StepPlan

STOP = 3
GREEDY = SamplingParams(temperature=0)

Slot = tuple[bytes, int, tuple[int, ...]] | str | None


def sequence(name: str, prompt: Iterable[int], max_new: int, **fields: object) -> Sequence:
    tokens = list(prompt)
    return Sequence(name, tokens, len(tokens), GREEDY, len(tokens) + max_new, frozenset({STOP}), 0, **fields)  # type: ignore[arg-type]


def next_token(tokens: list[int]) -> int:
    """Returns the fake model's next token, a function of the tokens alone; it stops now and then."""
    return sum(token * (31 + 7 * at) for at, token in enumerate(tokens[-3:])) * (len(tokens) + 5) % 6


def tokens_alone(seq: Sequence) -> list[int]:
    """All tokens that the sequence ends with when nobody disturbs it."""
    tokens = seq.tokens[: seq.prompt_len]
    while len(tokens) < seq.max_len:
        tokens.append(next_token(tokens))
        if tokens[-1] == STOP:
            break
    return tokens


def next_tokens(chunk: ScheduledChunk) -> list[int]:
    """Returns what a step finds: the next token, and for as long as the draft is right those behind it."""
    tokens, run = list(chunk.seq.tokens), list[int]()
    for guess in (*chunk.draft, None):
        run.append(next_token(tokens))
        tokens.append(run[-1])
        if run[-1] == STOP or run[-1] != guess:
            break
    return run


class Guesses:
    """A drafter that is right for a few tokens and then wrong, by turns, within the budget."""

    def add_drafts(
        self, decodes: list[ScheduledChunk], num_tokens: int, budget: int, reserve: Callable[[Sequence, int], int]
    ) -> None:
        for chunk in decodes:
            tokens, length = list(chunk.seq.tokens), len(chunk.seq.tokens)
            wanted, right = length * 7 % 6, length * 5 % 4
            count = reserve(chunk.seq, min(wanted, budget))
            assert 0 <= count <= min(wanted, budget)
            for at in range(count):
                tokens.append(next_token(tokens) if at < right else 1)
            chunk.add_draft(tokens[length:])
            budget -= count


class FakeDisk:
    """Blocks on a disk whose reads take some plans. `Memory` fills `stored`."""

    def __init__(self, slowness: int = 0) -> None:
        self.stored: dict[bytes, list[Slot]] = {}
        self.hits = 0
        self.came: list[DiskRead] = []  # with the last plan
        self.reads: list[DiskRead] = []  # `began_s` counts the plans that each of them still takes
        self._slowness = slowness

    def wants(self, block_hash: bytes) -> bool:
        return block_hash not in self.stored

    def forget(self, block_hash: bytes) -> None:
        self.stored.pop(block_hash, None)

    def on_its_way(self, block_hash: bytes) -> bytes | None:
        return next((read.key for read in self.reads if block_hash in read.hashes), None)

    def num_readable(self, hashes: Iterable[bytes]) -> int:
        return sum(1 for _ in takewhile(self.stored.__contains__, hashes))

    def read(self, hashes: Iterable[bytes]) -> bytes | None:
        found = list(takewhile(self.stored.__contains__, hashes))
        if not found:
            return None
        self.reads.append(DiskRead(b"read" + found[0], found, 0.0, self._slowness))
        return self.reads[-1].key

    def finished(self) -> list[DiskRead]:
        done = self.came = [read for read in self.reads if read.began_s == 0]
        self.reads = [read for read in self.reads if read.began_s > 0]
        for read in self.reads:
            read.began_s -= 1
        for read in done:
            there = takewhile(self.stored.__contains__, read.hashes)
            read.blocks = [(each, list(self.stored[each])) for each in there]  # type: ignore[misc]
        return done

    def cancel(self) -> list[bytes]:
        keys = [read.key for read in self.reads]
        self.reads = []
        return keys

    def note_hits(self, num_blocks: int) -> None:
        self.hits += num_blocks


class Memory:
    """The device's, the host's and the disk's blocks. `step` is what a runner does with a plan."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool, self.version = pool, 0
        self.device: list[list[Slot]] = [[None] * pool.block_size for _ in range(pool.num_blocks)]
        self.host: list[list[Slot]] = [[None] * pool.block_size for _ in range(pool.host.num_blocks)]
        self._hashes: dict[tuple[bytes, tuple[int, ...]], bytes] = {}

    def move(self, plan: StepPlan) -> None:
        disk = self.pool.disk
        for block, block_hash in plan.disk_out:
            assert isinstance(disk, FakeDisk) and block_hash not in disk.stored
            disk.stored[block_hash] = list(self.device[block])
        self._move(plan.swap_out, self.device, self.host)
        self._move(plan.swap_in, self.host, self.device)
        for content, block in plan.disk_in:
            self.device[block] = list(content)  # type: ignore[arg-type]
        self._move(plan.copies, self.device, self.device)

    def _move(self, moves: list[tuple[int, int]], source: list[list[Slot]], target: list[list[Slot]]) -> None:
        targets = [to for _, to in moves]
        assert len(set(targets)) == len(targets), "two moves write one block"
        content = [list(source[at]) for at, _ in moves]
        for to, slots in zip(targets, content, strict=True):
            target[to] = slots

    def compute(self, chunks: list[ScheduledChunk], poisoned: Sequence | None = None) -> None:
        size = self.pool.block_size
        written: set[tuple[int, int]] = set()
        for chunk in chunks:
            for at in range(chunk.start, chunk.start + chunk.length):
                block = chunk.seq.block_ids[at // size]
                assert self.pool.device.refs[block] == 1, "a shared block is written"
                assert (block, at % size) not in written, "two tokens share a slot"
                written.add((block, at % size))
                right = self.right(chunk.seq, at, chunk.draft)
                self.device[block][at % size] = "poison" if chunk.seq is poisoned else right
        for chunk in chunks:
            if chunk.seq is not poisoned:
                end = chunk.start + chunk.length
                self.check_sequence(chunk.seq, chunk.seq.block_ids, self.device, end, chunk.draft)

    def right(self, seq: Sequence, at: int, draft: Iterable[int] = ()) -> Slot:
        return seq.salt, self.version, (*seq.tokens, *draft)[: at + 1]

    def fill(self, seq: Sequence) -> None:
        """As an import of KV does."""
        size = self.pool.block_size
        for at in range(seq.num_computed):
            self.device[seq.block_ids[at // size]][at % size] = self.right(seq, at)

    def check_sequence(
        self,
        seq: Sequence,
        blocks: list[int],
        memory: list[list[Slot]],
        num_tokens: int,
        draft: Iterable[int] = (),
    ) -> None:
        size = self.pool.block_size
        for at in range(num_tokens):
            slot = memory[blocks[at // size]][at % size]
            assert slot == self.right(seq, at, draft), f"{seq.seq_id} reads another's KV"

    def check_index(self) -> None:
        """Checks that all that is registered is there, whole, and of the present weights."""
        disk = self.pool.disk
        stored = disk.stored if isinstance(disk, FakeDisk) else {}
        for tier, memory in ((self.pool.device, self.device), (self.pool.host, self.host), (None, stored.values())):
            for block, slots in enumerate(memory):
                registered = list(stored)[block] if tier is None else tier.forget(block)
                if registered is None:
                    continue
                if tier is not None:
                    tier.register(block, registered)
                last = slots[-1]
                assert isinstance(last, tuple), "a block is offered that holds nothing, or poison"
                salt, version, tokens = last
                assert version == self.version, "stale KV is offered"
                assert self._hash(salt, tokens) == registered, "a block is offered as what it is not"
                starts = range(len(tokens) - len(slots) + 1, len(tokens) + 1)
                assert slots == [(salt, version, tokens[:end]) for end in starts]

    def _hash(self, salt: bytes, tokens: tuple[int, ...]) -> bytes:
        if not tokens:
            return salt
        known = self._hashes.get((salt, tokens))
        if known is None:
            size = self.pool.block_size
            known = chain_hash(self._hash(salt, tokens[:-size]), tokens[-size:])
            self._hashes[salt, tokens] = known
        return known


class Life:
    """A scheduler at work on its memory."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.memory = scheduler, Memory(scheduler.pool)
        self.alive: list[Sequence] = []
        self.now_s = 0.0

    def add(self, seq: Sequence) -> Sequence:
        seq.arrival_s = self.now_s
        self.scheduler.add(seq)
        self.alive.append(seq)
        return seq

    def fork(self, parent: Sequence, child: Sequence) -> Sequence:
        child.arrival_s = self.now_s
        self.scheduler.fork(parent, child)
        self.alive.append(child)
        return child

    def step(self, poisoned: Sequence | None = None) -> StepPlan:
        plan = self.scheduler.plan(self.now_s)
        self.execute(plan, poisoned)
        return plan

    def execute(self, plan: StepPlan, poisoned: Sequence | None = None) -> None:
        self.memory.move(plan)
        self.memory.compute(plan.chunks, poisoned)
        if poisoned is not None:
            for block in self.scheduler.pool.discard(poisoned.block_ids):
                self.memory.device[block] = ["scrubbed"] * self.scheduler.pool.block_size
            self.scheduler.finish(poisoned, "error")
        due = {chunk.seq.seq_id: next_tokens(chunk) for chunk in plan.chunks if chunk.yields_token}
        if poisoned is not None:
            due.pop(poisoned.seq_id, None)
        self.scheduler.commit(plan, due)
        self.alive = [seq for seq in self.alive if seq.finish_reason is None]

    def run(self, most: int = 5000) -> None:
        """Until everybody has finished."""
        while self.scheduler.has_work:
            self.step()
            most -= 1
            assert most, "no end is in sight"
