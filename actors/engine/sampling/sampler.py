"""Chooses tokens from logits. Each row's token depends only on the row's logits, parameters, seed and position, never
on the batch.

The order is: logit bias, penalties, grammar mask, banned tokens, choice of the token. Log probabilities are those of
the model's unmodified logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from raytide.actors.engine.sampling.grammar_mask import GrammarMask
from raytide.actors.engine.sampling.logprobs import token_logprobs
from raytide.actors.engine.sampling.top_k_top_p import RandomSampler
from raytide.actors.engine.sequence import Sampled, ScheduledChunk, Sequence
from raytide.core.errors import RaytideError, UsageError

Tensor = torch.Tensor


class Sampler:
    """Chooses tokens. For each sequence it caches token counts and the grammar state until `forget`. Both can be
    rebuilt from the tokens at any time.
    """

    def __init__(self) -> None:
        self._occurrences: dict[str, Occurrences] = {}
        self._constraint = GrammarMask()
        self._batch = _Batch([], torch.device("cpu"))
        self._copy_RV = torch.empty(0, 0)

    def forget(self, seq: Sequence) -> None:
        self._occurrences.pop(seq.seq_id, None)
        self._constraint.forget(seq)

    @torch.inference_mode()
    def sample_runs(self, logits_RV: Tensor, chunks: Items[ScheduledChunk]) -> list[list[Sampled]]:
        """Returns the next tokens of each chunk's sequence. A sequence gets one drawn token. If this token equals the
        first draft token, the sequence gets a second one, and so on along the draft. The draft never changes which
        tokens are drawn. If a draw after the first one fails, the sequence gets only the tokens before the failed draw.
        The next step repeats that draw.

        Drafts are checked in rounds of one token for each sequence. If the drawn token equals the draft token, it is
        appended to the sequence before the next round. Penalties, grammars and bans thus apply at the right
        position. At the end of the call, the appended tokens are removed from the sequences again.
        """
        seqs = [chunk.seq for chunk in chunks]
        if not any(chunk.draft for chunk in chunks):
            return [[sampled] for sampled in self.sample(logits_RV, seqs)]
        rows = list(accumulate((1 + len(chunk.draft) for chunk in chunks), initial=0))[:-1]
        self._set_batch(seqs, logits_RV.device)
        if self._batch.is_plain:
            likely = _greedy(logits_RV)
            return [_greedy_run(likely, row, chunk) for row, chunk in zip(rows, chunks, strict=True)]
        lengths, runs = [len(seq.tokens) for seq in seqs], [list[Sampled]() for _ in seqs]
        going = list(range(len(chunks)))
        try:
            while going:
                rows_R = torch.tensor([rows[at] + len(runs[at]) for at in going], device=logits_RV.device)
                drawn = self.sample(logits_RV[rows_R], [seqs[at] for at in going])
                still = []
                for at, sampled in zip(going, drawn, strict=True):
                    run, draft = runs[at], chunks[at].draft
                    if sampled.token < 0 and run:
                        continue
                    run.append(sampled)
                    is_right = len(run) <= len(draft) and sampled.token == draft[len(run) - 1]
                    if is_right and not sampled.ends and sampled.token not in seqs[at].stop_token_ids:
                        seqs[at].tokens.append(sampled.token)
                        still.append(at)
                going = still
        except BaseException:
            for seq in seqs:  # what is cached has seen tokens that a repetition may not draw
                self.forget(seq)
            raise
        finally:
            for seq, length in zip(seqs, lengths, strict=True):
                del seq.tokens[length:]
        return runs

    @torch.inference_mode()
    def sample(self, logits_RV: Tensor, seqs: list[Sequence]) -> list[Sampled]:
        """Returns the next token of each row. Changes the logits. The token is -1 for a row with an `error`, and for a
        row whose logits have no finite maximum because the model failed.
        """
        self._set_batch(seqs, logits_RV.device)
        batch = self._batch
        if batch.is_plain:
            return _greedy(logits_RV)
        is_broken_R = ~logits_RV.amax(-1).isfinite()
        reported = self._reported(logits_RV, batch)
        errors = self._shape(logits_RV, batch)
        tokens = _choose(logits_RV, batch)
        tokens[is_broken_R] = -1
        sampled = list(map(Sampled, tokens.tolist()))
        for row, error in errors.items():
            sampled[row] = Sampled(-1, error=error)
        self._constraint.advance([(seqs[row], sampled[row]) for row in batch.structured])
        chosen = [max(0, sampled[row].token) for row in batch.reporting]
        for row, logprobs in zip(batch.reporting, token_logprobs(*reported, chosen, batch.logprob_counts), strict=True):
            sampled[row].logprobs = logprobs
        return sampled

    def _set_batch(self, seqs: list[Sequence], device: torch.device) -> None:
        if seqs != self._batch.seqs:  # by identity: an unchanged batch is not inspected again
            self._batch = _Batch(seqs, device)

    def allowed(self, seq: Sequence, draft: list[int]) -> int:
        """Returns the length of the longest prefix of the draft that obeys the sequence's grammar, in tokens."""
        return self._constraint.allowed(seq, draft)

    def _reported(self, logits_RV: Tensor, batch: _Batch) -> tuple[Tensor, list[int]]:
        """Returns the model's own logits, and the rows in them whose log probabilities are wanted. They are a copy only
        if `_shape` will change the logits. The copy's memory is reused, since allocating it takes longer than copying.
        """
        if not (batch.reporting and batch.is_shaped):
            return logits_RV, batch.reporting
        rows, vocab = len(batch.reporting), logits_RV.shape[1]
        if self._copy_RV.shape[0] < rows or self._copy_RV.shape[1] != vocab:
            self._copy_RV = logits_RV.new_empty(rows, vocab)
        reporting_R = torch.tensor(batch.reporting, device=logits_RV.device)
        torch.index_select(logits_RV, 0, reporting_R, out=self._copy_RV[:rows])
        return self._copy_RV, list(range(rows))

    def _shape(self, logits_RV: Tensor, batch: _Batch) -> dict[int, RaytideError]:
        """Applies biases, penalties, grammar masks and bans in place. Returns errors by row."""
        seqs = batch.seqs
        if batch.bias is not None:
            rows, tokens, values = batch.bias
            logits_RV[rows, tokens] += values
        if batch.penalized:
            penalized = [seqs[row] for row in batch.penalized]
            for seq in penalized:
                if seq.seq_id not in self._occurrences:
                    self._occurrences[seq.seq_id] = Occurrences(seq)
            seen = [self._occurrences[seq.seq_id] for seq in penalized]
            penalize(logits_RV, batch.penalized, penalized, seen)
        errors = self._constraint.mask(logits_RV, [(row, seqs[row]) for row in batch.structured])
        bans = {row: banned for row in batch.banning if (banned := banned_tokens(seqs[row]))}
        if bans:
            _ban(logits_RV, bans, batch.structured)
            for row in bans:
                if row not in errors and bool(logits_RV[row].amax() == -torch.inf):
                    hint = "Leave some token out of bad_words, stop_token_ids or min_tokens."
                    errors[row] = UsageError(f"request {seqs[row].seq_id}: every token is banned.", hint=hint)
        return errors


class _Batch:
    """The rows that use each option, computed once for as long as the same sequences run."""

    def __init__(self, seqs: list[Sequence], device: torch.device) -> None:
        self.seqs = list(seqs)
        self.reporting = self._rows(lambda seq: seq.params.needs_logprobs)
        self.logprob_counts = [seqs[row].params.logprobs or 0 for row in self.reporting]
        self.penalized = self._rows(lambda seq: seq.params.has_penalties)
        self.structured = self._rows(lambda seq: seq.grammar is not None)
        self.banning = self._rows(lambda seq: bool(seq.bad_words) or seq.params.min_tokens > 0)
        self.bias = _bias(seqs, device)
        self.drawn = self._rows(lambda seq: not seq.params.is_greedy)
        self.draws = RandomSampler(
            [seqs[row].params for row in self.drawn], [seqs[row].seed for row in self.drawn], device
        )
        self.is_shaped = bool(self.penalized or self.structured or self.banning or self.bias)
        self.is_plain = not (self.is_shaped or self.reporting or self.drawn)

    def _rows(self, holds: Callable[[Sequence], bool]) -> list[int]:
        return [row for row, seq in enumerate(self.seqs) if holds(seq)]


def _bias(seqs: Items[Sequence], device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns the rows, tokens and values of all logit biases; None without any."""
    biased = [(row, seq.params.logit_bias) for row, seq in enumerate(seqs) if seq.params.logit_bias]
    if not biased:
        return None
    # A request's samples share their parameters: each mapping is turned into arrays once.
    arrays = {id(bias): (np.fromiter(bias, np.int64), np.fromiter(bias.values(), np.float32)) for _, bias in biased}
    sizes = [len(bias) for _, bias in biased]
    rows = np.repeat(np.array([row for row, _ in biased]), sizes)
    tokens, values = (np.concatenate([arrays[id(bias)][part] for _, bias in biased]) for part in (0, 1))
    return (
        torch.from_numpy(rows).to(device),
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(values).to(device),
    )


def banned_tokens(seq: Sequence) -> list[int]:
    """Returns the tokens that may not come next: stop tokens before `min_tokens` is reached, and tokens that would
    complete a bad word.
    """
    banned = list(seq.stop_token_ids) if seq.output_len < seq.params.min_tokens else []
    return banned + seq.bad_words.next_banned(seq.tokens, seq.output_len) if seq.bad_words else banned


def _ban(logits_RV: Tensor, bans: dict[int, list[int]], structured: Items[int]) -> None:
    """Bans tokens in place. A row whose grammar allows only banned tokens stays as it is: an output cannot continue
    after its grammar's end.
    """
    ruled = [row for row in bans if row in structured]
    before_RV = logits_RV[ruled] if ruled else None
    rows = [row for row, banned in bans.items() for _ in banned]
    tokens = [token for banned in bans.values() for token in banned]
    logits_RV[torch.tensor(rows, device=logits_RV.device), torch.tensor(tokens, device=logits_RV.device)] = -torch.inf
    if before_RV is not None:
        is_empty = (logits_RV[ruled].amax(-1) == -torch.inf)[:, None]
        logits_RV[ruled] = torch.where(is_empty, before_RV, logits_RV[ruled])


def _choose(logits_RV: Tensor, batch: _Batch) -> Tensor:
    positions = [len(batch.seqs[row].tokens) for row in batch.drawn]
    if len(batch.drawn) == len(batch.seqs):
        return batch.draws.draw(logits_RV, positions)
    tokens = _argmax(logits_RV)
    if batch.drawn:
        tokens[batch.drawn] = batch.draws.draw(logits_RV, positions, batch.drawn)
    return tokens


def _greedy(logits_RV: Tensor) -> list[Sampled]:
    """Returns the most likely token of each row; -1 for a row with NaN or infinity. The argmax selects these, so it is
    enough to check the chosen logit.
    """
    if logits_RV.device.type == "cpu":
        values_RV = logits_RV.numpy()
        likely = enumerate(values_RV.argmax(-1).tolist())
        return [Sampled(token if math.isfinite(values_RV[row, token]) else -1) for row, token in likely]
    tokens_R = logits_RV.argmax(-1)
    is_sound_R = logits_RV.gather(-1, tokens_R[:, None]).isfinite().squeeze(1)
    return list(map(Sampled, torch.where(is_sound_R, tokens_R, -1).tolist()))


def _greedy_run(likely: list[Sampled], row: int, chunk: ScheduledChunk) -> list[Sampled]:
    run = [likely[row]]
    for token in chunk.draft:
        following = likely[row + len(run)]
        if run[-1].token != token or token in chunk.seq.stop_token_ids or following.token < 0:
            break
        run.append(following)
    return run


def _argmax(logits_RV: Tensor) -> Tensor:
    if logits_RV.device.type == "cpu":  # torch's own takes ten times as long there
        return torch.from_numpy(logits_RV.numpy().argmax(-1))
    return logits_RV.argmax(-1)


class Occurrences:
    """Counts how often each token occurs in the output of one sequence, updated incrementally."""

    def __init__(self, seq: Sequence) -> None:
        # Tokens of the prompt count for the repetition penalty alone.
        prompt = seq.tokens[: seq.prompt_len] if seq.params.repetition_penalty != 1.0 else []
        distinct = np.unique(np.array(prompt, np.int64))
        self._place = {token: place for place, token in enumerate(distinct.tolist())}
        self._ids = distinct
        self._outputs = np.zeros(len(distinct), np.float32)
        self._known = seq.prompt_len

    def update(self, seq: Sequence) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Counts the sequence's new tokens. Returns two arrays: distinct tokens, and how often each of them occurs in
        the output. The prompt's tokens are included only if the sequence has a repetition penalty.
        """
        for token in seq.tokens[self._known :]:
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._ids):
                self._ids = np.resize(self._ids, 2 * place + 16)
                self._outputs = np.pad(self._outputs, (0, place + 16))
            self._ids[place] = token
            self._outputs[place] += 1.0
        self._known = len(seq.tokens)
        size = len(self._place)
        return self._ids[:size], self._outputs[:size]


def penalize(logits_RV: torch.Tensor, rows: Items[int], seqs: Items[Sequence], seen: Items[Occurrences]) -> None:
    """Applies each row's penalties in place: OpenAI's presence and frequency penalties over the output, and CTRL's
    repetition penalty over prompt and output (arXiv 1909.05858).

    It touches only the logits of tokens that occurred, so the cost grows with the text and not with the vocabulary.
    """
    ids, outputs = zip(*(each.update(seq) for each, seq in zip(seen, seqs, strict=True)), strict=True)
    sizes = [len(each) for each in ids]

    def per_token(values: Items[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), sizes)).to(logits_RV.device)

    row_N = torch.from_numpy(np.repeat(np.array(rows), sizes)).to(logits_RV.device)
    token_N = torch.from_numpy(np.concatenate(ids)).to(logits_RV.device)
    output_N = torch.from_numpy(np.concatenate(outputs)).to(logits_RV.device)
    repetition_N = per_token([seq.params.repetition_penalty for seq in seqs])
    value_N = logits_RV[row_N, token_N]
    value_N = torch.where(value_N > 0, value_N / repetition_N, value_N * repetition_N)
    value_N -= output_N * per_token([seq.params.frequency_penalty for seq in seqs])
    value_N -= (output_N > 0) * per_token([seq.params.presence_penalty for seq in seqs])
    logits_RV[row_N, token_N] = value_N
