"""The engine's commands that run between two steps: pause, sleep, change of weights, adapters, cache lookup, and the
export and import of requests.

No command loses a request. If a command discards KV, the engine computes the KV again from the tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from raytide.actors.engine.backends.native.disk_cache import flush, open_folder
from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.backends.native.input_processor import Prepared
from raytide.actors.engine.base import check_features
from raytide.actors.engine.kv_cache.block_pool import chain_hash
from raytide.actors.engine.kv_cache.handle import KvHandle, KvHeader
from raytide.actors.engine.model.decoder import PagedDecoder
from raytide.actors.engine.sequence import Sequence
from raytide.actors.engine.types import GenRequest, SampleProgress
from raytide.actors.models.components.rope import uses_long_factors
from raytide.actors.models.content import WeightsSource, content_digest
from raytide.actors.models.families import is_same_architecture, read_architecture
from raytide.actors.models.quantized.gguf.packaged_models import packaged_path
from raytide.core.errors import ConflictError, UsageError

_log = logging.getLogger(__name__)


def pause(core: EngineCore) -> None:
    """Stops taking steps until `resume`."""
    if core.state == "serving":
        core.state = "paused"


def resume(core: EngineCore) -> None:
    if core.state == "asleep":
        raise ConflictError("the engine sleeps.", hint="Wake it.")
    core.state = "serving"


def sleep(core: EngineCore, level: Literal[1, 2]) -> None:
    """Frees memory: level 1 frees the KV cache, level 2 frees the weights as well. An engine that sleeps at level 1 can
    change to level 2.
    """
    flush_to_disk(core)
    core.scheduler.invalidate()
    core.state = "asleep"
    core.runner.sleep(level)


def wake(core: EngineCore) -> None:
    """Allocates the memory that `sleep` freed, and resumes. If that fails, the engine stays asleep and `wake` can be
    called again.
    """
    if core.state != "asleep":
        return
    if not core.runner.has_weights:
        core.weights.check_unchanged()
        core.runner.use(core.runner.load(core.weights.model_dir))
    core.runner.allocate()
    core.state = "serving"


def flush_to_disk(core: EngineCore) -> None:
    """Writes cached prefixes to the disk tier, as many as a few seconds allow. A failure is only logged, and the
    prefixes that are not yet written are lost.
    """
    try:
        flush(core.disk, core.pool, core.runner.cache)
    except Exception as error:
        _log.warning("cached prefixes were not written to disk: %r", error)


def read_weights(core: EngineCore, source: str, version: str | None) -> tuple[PagedDecoder, WeightsSource]:
    """Loads other weights while the engine runs. Thread-safe. Raises ConflictError for another architecture, or if the
    files change while they are read.
    """
    model_dir = Path(packaged_path(source) or source)
    theirs, ours = read_architecture(model_dir, serves=True), core.runner.arch
    if not is_same_architecture(theirs, ours):
        raise ConflictError(
            f"{model_dir} holds a model of another architecture than {core.weights.model_dir}.",
            hint="Start another engine for it.",
        )
    weights = WeightsSource.at(model_dir, version)
    model = core.runner.load(model_dir)
    try:
        weights.check_unchanged()
    except BaseException:
        model.discard()
        raise
    return model, weights


def use_weights(core: EngineCore, model: PagedDecoder, weights: WeightsSource) -> None:
    """Makes the model compute with these weights from the next step on. Running requests continue with the new
    weights.
    """
    core.runner.use(model)
    core.weights = weights
    core.info = replace(
        core.info,
        weights_version=weights.version,
        quantization=core.runner.quantization,
        streamed_layers=core.runner.streamed_layers,
    )
    core.salt_again()
    core.scheduler.invalidate()
    if core.disk is not None:
        core.disk.change_folder(partial(open_folder, core.config, core.runner, weights))


def load_lora(core: EngineCore, name: str, path: str) -> None:
    folder = Path(path)
    core.runner.load_lora(name, folder)
    content = content_digest(folder).encode() + (folder / "adapter_config.json").read_bytes()
    core.adapter_contents[name] = blake2b(content, digest_size=8).hexdigest()


def unload_lora(core: EngineCore, name: str) -> None:
    """Removes an adapter. Raises ConflictError while requests use it."""
    if core.uses_lora(name):
        raise ConflictError(f"requests use adapter {name}.", hint="Unload it when they have ended.")
    core.runner.unload_lora(name)
    del core.adapter_contents[name]


def cached_prefix(core: EngineCore, tokens: Items[int], lora: str | None, cache_salt: str) -> int:
    """Returns the number of tokens at the start of a prompt that need no computation. These are the tokens in the
    prefix cache and, if reading is cheaper than computing, the next tokens on disk. The prompt's last token is always
    computed.
    """
    size, parent, hashes = core.pool.block_size, core.salt(lora, cache_salt), list[bytes]()
    for start in range(0, (len(tokens) - 1) // size * size, size):
        parent = chain_hash(parent, tokens[start : start + size])
        hashes.append(parent)
    in_memory, disk = len(core.pool.match(hashes)), core.pool.disk
    on_disk = 0 if disk is None else disk.num_readable(hashes[in_memory:])
    return (in_memory + on_disk) * size


def export_kv(core: EngineCore, request_id: str) -> KvHandle:
    """Ends a request in this engine and returns the request's KV. Another engine can continue the request with this KV.
    Raises NotFoundError for an unknown request, and ConflictError for a request with several samples.
    """
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
    """Continues a request that another engine exported. In three cases, the request waits in the queue, and this engine
    computes the KV again: there is no room for the KV now, this engine sleeps, or the export contains no KV.

    Raises the same errors as `EngineCore.add`. Raises UsageError if `request` is not the exported request, and
    ConflictError if the KV is from another model, version or layout.
    """
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
        try:
            core.runner.cache.write(seq.block_ids[: header.num_blocks], handle.layers)
        except BaseException:
            core.scheduler.finish(seq, "error")  # a step would compute a sequence that has no output
            raise
        answer.is_prompt_imported = True
    else:
        core.scheduler.add(seq)
    core.track_outputs(answer)


def _header(core: EngineCore, seq: Sequence) -> KvHeader:
    runner = core.runner
    rotations = [uses_long_factors(rope, runner.max_len) for rope in runner.arch.ropes]
    num_computed = min(seq.num_computed, len(seq.block_ids) * runner.block_size)
    awaits_prompt_logprobs = seq.params.prompt_logprobs is not None and seq.output_len == 0
    return KvHeader(
        model=blake2b(repr((runner.arch, rotations)).encode(), digest_size=8).hexdigest(),
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
