"""Checks requests and turns them into sequences."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b

from raytide.actors.engine.base import check_prompt, check_resume
from raytide.actors.engine.limits import MAX_COPIED_TOKENS
from raytide.actors.engine.model.vision.pixels import ImageProcessor, PreparedImage
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.sequence import ImageSpan, PooledPrompt, Sequence
from raytide.actors.engine.text.bad_words import BadWords, bad_word_tokens
from raytide.actors.engine.text.stop_strings import prepare_stops
from raytide.actors.engine.text.structured_output import Grammar, GrammarCompiler
from raytide.actors.engine.text.tokenizer import Tokenizer
from raytide.actors.engine.types import GenRequest, SampleProgress
from raytide.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request's compiled grammar, bad words and decoded images, prepared outside the engine's thread."""

    grammar: Grammar | None = None
    bad_words: BadWords | None = None
    images: tuple[PreparedImage, ...] = ()


class InputProcessor:
    """Checks requests against the model's limits, and turns the requests into sequences.

    Requests without a seed get consecutive seeds.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_len: int,
        max_samples: int,
        vocab_size: int,
        eos: frozenset[int],
        seed: int | None,
        any_whitespace: bool = False,
        images: ImageProcessor | None = None,
    ) -> None:
        self._images = images
        self.grammars = GrammarCompiler(tokenizer.rust.to_str, vocab_size, eos, any_whitespace=any_whitespace)
        self._tokenizer = tokenizer
        self._max_len, self._max_samples, self._vocab_size, self._eos = max_len, max_samples, vocab_size, eos
        self._seed = secrets.randbits(62) if seed is None else seed

    def checked(self, who: str, prompt: Items[int]) -> list[int]:
        """Returns the prompt as a list. Raises UsageError for an empty or too long prompt, or for an unknown token."""
        check_prompt(who, prompt, max_len=self._max_len, vocab_size=self._vocab_size)
        return list(prompt)

    def bad_words(self, params: SamplingParams) -> BadWords | None:
        """Returns the tokenized bad words of a request, or None if the request has no bad words. Also prepares the
        request's stop strings. Thread-safe.
        """
        prepare_stops(params)
        if not params.bad_words:
            return None
        encode = partial(self._tokenizer.encode_all, plain=True)
        return bad_word_tokens(params.bad_words, encode, self._tokenizer.spell, self._tokenizer.rust.token_to_id)

    def images(self, request: GenRequest) -> tuple[PreparedImage, ...]:
        """Decodes the images of a request. Returns no images if the model cannot read images. Raises UsageError for an
        unreadable image. Thread-safe.
        """
        processor = self._images
        if processor is None:
            return ()
        return tuple(processor.prepare(data, index) for index, data in enumerate(request.images))

    async def prepare(self, request: GenRequest) -> Prepared:
        """Prepares a request's stop strings and bad words, compiles its grammar and decodes its images, all in separate
        threads. Raises UsageError or OverloadedError.
        """
        params, bad_words = request.sampling, None
        if params.bad_words or params.stop:
            bad_words = await self._tokenizer.pool.run(lambda: self.bad_words(params))
        grammar = None if params.structured is None else await self.grammars.compile_async(params.structured)
        images = await self._tokenizer.pool.run(lambda: self.images(request)) if request.images else ()
        return Prepared(grammar, bad_words, images)

    def sequences(
        self, request: GenRequest, prompt: Items[int], salt: bytes, now_s: float, prepared: Prepared | None = None
    ) -> list[Sequence]:
        """Returns one sequence for each sample of a request. If the request has a seed, sample i uses the seed `seed +
        i`, and gets the same tokens as a request for one sample with the seed `seed + i`. In a resumed request, each
        sequence has the tokens so far. If a sample has already ended, its sequence also has a finish reason.

        If `prepared` is None, this call prepares the grammar, bad words and images itself.
        """
        params, limit = request.sampling, self._max_len
        tokens = self.checked(f"request {request.request_id}", prompt)
        self._check_tokens(request.request_id, params)
        if prepared is None:
            grammar = None if params.structured is None else self.grammars.compile(params.structured)
            prepared = Prepared(grammar, self.bad_words(params), self.images(request))
        spans = self._spans(request.request_id, tokens, prepared.images)
        if params.num_samples > self._max_samples:
            raise UsageError(
                f"request {request.request_id} asks for {params.num_samples} samples; the engine runs "
                f"{self._max_samples} sequences at once.",
                hint="Ask for fewer, or raise max_running.",
            )
        if params.num_samples > 1 and params.num_samples * len(tokens) > MAX_COPIED_TOKENS:
            raise UsageError(
                f"request {request.request_id} asks for {params.num_samples} samples of {len(tokens)} tokens.",
                hint=f"Samples times prompt tokens must be at most {MAX_COPIED_TOKENS}.",
            )
        max_len = limit if params.max_tokens is None else min(limit, len(tokens) + params.max_tokens)
        stop_token_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        check_resume(request, len(tokens), max_len=max_len, vocab_size=self._vocab_size, stop_token_ids=stop_token_ids)
        progress = [*request.resume, *[SampleProgress()] * (params.num_samples - len(request.resume))]
        # The prompt's log probabilities come with the first token of the first sample.
        others = replace(params, prompt_logprobs=None) if params.prompt_logprobs is not None else params
        own = [others if index or done.token_ids else params for index, done in enumerate(progress)]
        if params.seed is None:
            self._seed += params.num_samples
        first_seed = self._seed - params.num_samples + 1 if params.seed is None else params.seed
        return [
            Sequence(
                seq_id=request.request_id if index == 0 else f"{request.request_id}#{index}",
                tokens=[*tokens, *done.token_ids],
                prompt_len=len(tokens),
                params=own[index],
                max_len=max_len,
                stop_token_ids=stop_token_ids,
                seed=first_seed + index,
                priority=request.priority,
                deadline_s=math.inf if request.deadline_s is None else now_s + request.deadline_s,
                arrival_s=now_s,
                lora=request.lora,
                salt=salt,
                team=request.team,
                weight=request.weight,
                finish_reason=done.finish_reason,
                reads_cache=own[index].prompt_logprobs is None,
                request_id=request.request_id,
                index=index,
                gave_way=request.gave_way,
                bad_words=prepared.bad_words,
                grammar=prepared.grammar,
                images=spans,
            )
            for index, done in enumerate(progress)
        ]

    def pooled_sequence(
        self, request: GenRequest, prompt: Items[int], salt: bytes, now_s: float, pooled: PooledPrompt
    ) -> Sequence:
        """Returns the sequence of a prompt whose output is a vector. The sequence does not read the prefix cache,
        because the cache holds no hidden states.
        """
        tokens = self.checked(f"request {request.request_id}", prompt)
        self._spans(request.request_id, tokens, ())  # an image token has no meaning of its own
        return Sequence(
            seq_id=request.request_id,
            tokens=tokens,
            prompt_len=len(tokens),
            params=request.sampling,
            max_len=len(tokens),
            stop_token_ids=frozenset(),
            seed=0,
            priority=request.priority,
            arrival_s=now_s,
            lora=request.lora,
            salt=salt,
            team=request.team,
            weight=request.weight,
            reads_cache=False,
            request_id=request.request_id,
            pooled=pooled,
        )

    def _spans(self, request_id: str, tokens: list[int], images: tuple[PreparedImage, ...]) -> tuple[ImageSpan, ...]:
        """Returns the places of the images in a prompt. Raises UsageError if the prompt's image tokens do not match the
        images.
        """
        if self._images is None:
            return ()
        spec = self._images.spec
        places = [place for place, token in enumerate(tokens) if token == spec.image_token]
        starts = places[:: spec.num_tokens]
        whole = [place for start in starts for place in range(start, start + spec.num_tokens)]
        if len(starts) != len(images) or places != whole:
            raise UsageError(
                f"request {request_id}: {len(places)} image tokens in the prompt, but {len(images)} images of "
                f"{spec.num_tokens} tokens each.",
                hint="Send images in the messages of a chat.",
            )
        return tuple(
            ImageSpan(start, spec.num_tokens, image.digest, image.pixels)
            for start, image in zip(starts, images, strict=True)
        )

    def _check_tokens(self, request_id: str, params: SamplingParams) -> None:
        for name in ("logit_bias", "stop_token_ids"):
            unknown = [token for token in getattr(params, name) if not 0 <= token < self._vocab_size]
            if unknown:
                raise UsageError(
                    f"request {request_id}: {name} has token {unknown[0]}; the model has 0 to {self._vocab_size - 1}.",
                    hint="Use the tokenizer of this model.",
                )


def salt_of(weights_version: str, adapter: str, cache_salt: str) -> bytes:
    """Returns the salt of block hashes: a hash of the weights' version, the adapter and the request's cache salt. Only
    sequences with the same salt share blocks.
    """
    return blake2b("\0".join((weights_version, adapter, cache_salt)).encode(), digest_size=16).digest()
