"""raytide's extension of vLLM's worker: it ends the worker's process when its parent is killed. It runs inside vLLM's
process and imports nothing of raytide.

vLLM imports this module before it starts the worker's device and group, so that a worker that still waits for other
members ends too. Otherwise vLLM's processes would outlive a killed parent, with all their memory.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import signal
import threading


class EndsWithParent:
    """The class that vLLM mixes into its worker, by its option `worker_extension_cls`. Importing it is enough."""


def _kill_when_it_ends(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


if (_parent := multiprocessing.parent_process()) is not None:
    threading.Thread(target=_kill_when_it_ends, args=(_parent,), name="ends-with-parent", daemon=True).start()
