"""A sequence inside the engine, and the step that advances it. This module does not import torch. The scheduler and its
tests therefore run without torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.types import FinishReason, TokenLogprobs
from raytide.core.errors import RaytideError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from raytide.actors.engine.text.bad_words import BadWords
    from raytide.actors.engine.text.structured_output import Grammar

Rank = tuple[float, float, int]
"""Level, due time, arrival: the smallest goes first."""
Pooling = Literal["cls", "last", "mean"]


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The positions of a prompt that stand for an image. Images with equal pixels [3, S, S] have the same digest."""

    start: int
    length: int
    digest: bytes
    pixels: npt.NDArray[np.float32]


@dataclass(slots=True)
class PooledPrompt:
    """The rules that turn a prompt's last hidden states into one vector (see `model/pooling.py`). If `classify` is
    True, the vector is the output of the model's classification head. Otherwise it is scaled to length 1 if `normalize`
    is True.
    """

    pooling: Pooling
    normalize: bool = True
    classify: bool = False
    sums: dict[int, Tensor] = field(default_factory=dict)  # float64, of each computed chunk by its first position


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request. `tokens` holds the prompt and the output. The first `num_computed` of these tokens have
    KV.
    """

    seq_id: str
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    max_len: int  # finished with "length" when `tokens` reaches this
    stop_token_ids: frozenset[int]  # with the model's end tokens, unless ignore_eos
    seed: int
    arrival: int = -1  # set by the scheduler; the order of service
    num_computed: int = 0
    num_cached: int = 0
    preemptions: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    # Lower `priority` goes first; `deadline_s` and `arrival_s` are on the core's clock.
    priority: int = 0
    deadline_s: float = math.inf
    arrival_s: float = 0.0
    # Beside the tokens, KV depends on these: blocks are shared only among sequences of one salt.
    lora: str | None = None
    salt: bytes = b""
    team: str = ""
    weight: float = 1.0  # of its team
    reads_cache: bool = True  # False: every position's logits are wanted, so the whole prompt is computed
    request_id: str = ""
    index: int = 0  # of this sample in its request
    gave_way: bool = False  # begun, and taken out for another request: it queues as a new one
    # For each prompt position computed so far, when requested; None for the first.
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    bad_words: BadWords | None = None  # that the output must not contain
    grammar: Grammar | None = None  # that the output must match
    images: tuple[ImageSpan, ...] = ()
    pooled: PooledPrompt | None = None  # the output is this vector; no token follows the prompt
    # The scheduler's state. `host_ids` are the blocks of a swapped out sequence.
    host_ids: list[int] = field(default_factory=list)
    num_registered: int = 0  # blocks offered to the prefix cache
    starts: int = 0
    waited_s: float = 0.0  # in total before its last start
    waiting_since_s: float = 0.0
    level: int = 0
    rank: Rank = (0.0, 0.0, 0)  # while it runs
    turns: float = -1.0  # in steps that are shared with lighter teams
    parent: Sequence | None = None  # the sample whose prompt KV it starts from
    asks_disk: bool = True  # once for each start

    @property
    def num_pending(self) -> int:
        """The number of tokens that have no KV yet. It is 1 while the sequence decodes."""
        return len(self.tokens) - self.num_computed

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len


@dataclass(slots=True)
class ScheduledChunk:
    """Consecutive positions of one sequence that one step computes: `start` to `start + length`. The last positions are
    those of `draft`, the guesses of the sequence's next tokens.
    """

    seq: Sequence
    start: int
    length: int
    draft: Items[int] = ()

    @property
    def yields_token(self) -> bool:
        """True if this step computes the last of the sequence's tokens, so that a next token is sampled. Always False
        for a pooled prompt.
        """
        return self.seq.pooled is None and self.start + self.length == len(self.seq.tokens) + len(self.draft)

    def add_draft(self, tokens: Items[int]) -> None:
        """Replaces the chunk's draft. The step computes the draft's tokens as well. The logits after a draft token
        count only if the draft token equals the token that is sampled at its position.
        """
        self.draft, self.length = tokens, self.length - len(self.draft) + len(tokens)


@dataclass(slots=True)
class Sampled:
    """The next token of a sequence. `ends` is True if the sequence's grammar allows nothing after this token.

    Stop tokens, stop strings and length limits are checked elsewhere and do not set `ends`.

    `token` is -1 if no token could be sampled. `error` is then the reason. If `error` is None, the reason is that
    the logits were not finite.
    """

    token: int
    logprobs: TokenLogprobs | None = None
    ends: bool = False
    error: RaytideError | None = None


@dataclass(slots=True)
class StepPlan:
    """One step of the model: the chunks to compute, and the sequences evicted for it.

    Blocks move before anything is computed, in this order: disk_out, swap_out, swap_in, disk_in, copies.
    """

    chunks: list[ScheduledChunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (device block, device block), for copy on write
    disk_out: list[tuple[int, bytes]] = field(default_factory=list)  # (device block, hash)
    disk_in: list[tuple[npt.NDArray[np.uint8], int]] = field(default_factory=list)  # (content, device block)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def is_decode(self) -> bool:
        """True if each sequence computes only one token, plus the sequence's draft tokens."""
        return bool(self.chunks) and all(chunk.length == 1 + len(chunk.draft) for chunk in self.chunks)
