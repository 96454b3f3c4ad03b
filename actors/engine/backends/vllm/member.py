"""Runs a vLLM engine's workers on a node other than the first: `python -m raytide.actors.engine.backends.vllm.member`.

It reads its instructions as a line of JSON from stdin. It then starts this node's vLLM workers, which connect to the
workers of the other nodes. It ends, with its workers, when a worker ends or when the process that started it has gone.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from importlib import import_module
from typing import Any

from raytide.actors.engine.backends.vllm.config import Span, VllmConfig, environment
from raytide.actors.engine.backends.vllm.launch import engine_args, import_vllm
from raytide.actors.engine.model.parallel.link import watch
from raytide.core.logs import log_to

_log = logging.getLogger(__name__)

MODULE = "raytide.actors.engine.backends.vllm.member"


def compute(order: dict[str, Any]) -> None:
    """Runs this node's workers until one of them ends."""
    config = VllmConfig.parse({**order["config"], "model_dir": order["model_dir"]}, where="engine options")
    span = Span(order["size"], order["rank"], order["host"], order["port"], order["own_host"], int(order["secret"]))
    with environment(config, int(os.environ["OMP_NUM_THREADS"]), span.own_host):
        modules = import_vllm()
        executor_class = import_module("vllm.v1.executor.multiproc_executor").MultiprocExecutor
        vllm_config = engine_args(config, modules, span).create_engine_config(headless=True)
        executor = executor_class(vllm_config, monitor_workers=False)
    executor.start_worker_monitor(inline=True)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the first node decides
    log_to()
    order = json.loads(sys.stdin.readline())
    watch([sys.stdin.fileno()], lambda _: os._exit(0))  # vLLM's workers end with their parent
    try:
        compute(order)
    except BaseException:
        _log.critical("member %d ends", order["rank"], exc_info=True)
    os._exit(1)


if __name__ == "__main__":
    main()
