"""Opens an engine's KV cache folder on local disk, and writes the engine's cached blocks to the folder when the engine
ends.
"""

from __future__ import annotations

import errno
import json
import logging
import time
from hashlib import blake2b
from pathlib import Path

import torch

from raytide.actors.engine.config import EngineConfig
from raytide.actors.engine.kv_cache.block_folder import BlockFolder
from raytide.actors.engine.kv_cache.block_pool import BlockPool
from raytide.actors.engine.kv_cache.disk_tier import DiskTier
from raytide.actors.engine.kv_cache.kv_cache import KvCache
from raytide.actors.engine.model.model_runner import ModelRunner
from raytide.actors.models.content import WeightsSource
from raytide.core.config import installed_version
from raytide.core.errors import ConfigError
from raytide.kernels.library import operators_key

_log = logging.getLogger(__name__)

_DISK_FAILS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
_FLUSH_S = 5.0
_FLUSHED_AT_ONCE = 16


def open_disk_tier(config: EngineConfig, runner: ModelRunner, weights: WeightsSource) -> DiskTier | None:
    """Returns the disk tier of the KV cache, after measuring the speeds of the disk and the model. Returns None if the
    options name no `local_disk`, or if the disk fails. Raises ConfigError for a folder that cannot be used.
    """
    if config.local_disk is None:
        return None
    try:
        folder = open_folder(config, runner, weights)
        byte_s = folder.seconds_per_byte()
    except ConfigError:
        runner.close()
        raise
    except OSError as error:
        if error.errno not in _DISK_FAILS:
            runner.close()
            raise ConfigError(
                f"local_disk {config.local_disk} cannot be used: {error}.", hint="Name a folder of your own."
            ) from None
        _log.warning("the KV cache on local disk %s is off: %s", config.local_disk, error)
        return None
    return DiskTier(folder, block_tokens=runner.block_size, token_s=runner.prefill_token_s, byte_s=byte_s)


def open_folder(config: EngineConfig, runner: ModelRunner, weights: WeightsSource) -> BlockFolder:
    assert config.local_disk is not None
    root = Path(config.local_disk.removeprefix("file://"))
    limit = int(config.max_local_disk_size * 1e9)
    return BlockFolder(root, _identity(config, runner, weights), sum(runner.cache.block_bytes), limit)


def flush(disk: DiskTier | None, pool: BlockPool, cache: KvCache) -> None:
    """Writes the device's cached blocks to disk, until all are written or 5 s have passed. Blocks in use are written
    first, then the most recently used ones. Within a prefix, earlier blocks are written first.
    """
    if disk is None or not cache.layers:
        return
    ends_s, cached = time.monotonic() + _FLUSH_S, pool.device.cached()
    for start in range(0, len(cached), _FLUSHED_AT_ONCE):
        wanted = [each for each in cached[start : start + _FLUSHED_AT_ONCE] if disk.wants(each[1])]
        if wanted:
            blocks, hashes = zip(*wanted, strict=True)
            disk.write(hashes, cache.read(blocks))
            disk.flush(max(0.0, ends_s - time.monotonic()))
        if time.monotonic() >= ends_s or not disk.is_on:
            return


def _identity(config: EngineConfig, runner: ModelRunner, weights: WeightsSource) -> str:
    """Returns a name for everything, apart from its tokens, on which the bits of a block's KV depend."""
    terms = {
        "architecture": repr(runner.arch),
        "weights": weights.content,
        # The hash of the content takes samples: a file that was written to since is not the same.
        "files": [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in _weight_files(weights)],
        "dtype": runner.kv_dtype_name,
        "layout": runner.cache.block_bytes,
        "block_size": runner.block_size,
        "max_len": runner.max_len,
        "options": [config.tensor_parallel, config.deterministic, runner.quantization],
        "code": [installed_version("raytide") or "", torch.__version__, operators_key(), runner.operators],
    }
    digest = blake2b(json.dumps(terms, sort_keys=True).encode(), digest_size=10).hexdigest()
    return f"kv-{runner.kv_dtype_name.replace(' ', '-')}-{runner.block_size}-{digest}"


def _weight_files(weights: WeightsSource) -> list[Path]:
    place = weights.model_dir
    return [place] if place.is_file() else sorted(place.glob("*.safetensors"))
