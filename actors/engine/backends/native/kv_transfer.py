"""Moves a request with its KV from one engine to another, for disaggregated prefill and live migration."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from dataclasses import replace
from hashlib import blake2b

from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.backends.native.input_processor import Prepared
from raytide.actors.engine.base import check_features
from raytide.actors.engine.kv_cache.handle import KvHandle, KvHeader
from raytide.actors.engine.sequence import Sequence
from raytide.actors.engine.types import GenRequest, SampleProgress
from raytide.core.errors import ConflictError, UsageError


def export_kv(core: EngineCore, request_id: str) -> KvHandle:
    """Ends the request here and returns its handle. Raises NotFoundError or ConflictError."""
    answer = core.request_state(request_id)
    if len(answer.samples) > 1:
        raise ConflictError(
            f"request {request_id} has {len(answer.samples)} samples.", hint="Only requests of one sample can move."
        )
    seq = answer.samples[0].seq
    header = _header(core, seq)
    layers = core.runner.cache.read(seq.block_ids[: header.num_blocks])
    core.abort(request_id)
    return KvHandle(header, layers)


def import_kv(
    core: EngineCore, handle: KvHandle, request: GenRequest, prompt: Items[int], prepared: Prepared | None = None
) -> None:
    """Continues an exported request. Without room for its KV now, it queues and is computed again."""
    header, now_s = handle.header, time.monotonic()
    check_features(request, core.info.features, core.info.backend)
    if request.sampling.num_samples > 1 or list(prompt) != header.tokens[: header.prompt_len]:
        raise UsageError(
            f"request {request.request_id} is not the one that was exported: that had one sample, a prompt of "
            f"{header.prompt_len} tokens and {len(header.tokens) - header.prompt_len} tokens of output.",
            hint="Import with the prompt and the parameters of the export.",
        )
    request = replace(request, resume=(SampleProgress(tuple(header.tokens[header.prompt_len :])),))
    seqs = core.input_processor.sequences(request, prompt, core.salt(request.lora, request.cache_salt), now_s, prepared)
    core.check_room(seqs)
    seq = seqs[0]
    handle.check_fits(_header(core, seq))
    answer = core.new_state(request, seqs, now_s)
    seq.seed, seq.num_cached = header.seed, header.num_cached
    if header.num_computed and core.state != "asleep" and core.scheduler.adopt(seq, header.num_computed):
        core.runner.cache.write(seq.block_ids[: header.num_blocks], handle.layers)
        answer.is_prompt_imported = True
    else:
        core.scheduler.add(seq)
    core.track_outputs(answer)


def _header(core: EngineCore, seq: Sequence) -> KvHeader:
    runner = core.runner
    num_computed = min(seq.num_computed, len(seq.block_ids) * runner.block_size)
    awaits_prompt_logprobs = seq.params.prompt_logprobs is not None and seq.output_len == 0
    return KvHeader(
        model=blake2b(repr(runner.arch).encode(), digest_size=8).hexdigest(),
        weights_version=core.weights.version,
        lora=core.adapter_of(seq),
        dtype=runner.kv_dtype_name,
        layout=runner.cache.block_bytes,
        block_size=runner.block_size,
        tokens=list(seq.tokens),
        prompt_len=seq.prompt_len,
        num_computed=0 if awaits_prompt_logprobs else num_computed,
        num_cached=seq.num_cached,
        seed=seq.seed,
    )
