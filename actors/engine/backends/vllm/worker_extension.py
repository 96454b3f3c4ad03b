"""raytide's extension of vLLM's worker: it ends the worker's process when the worker's parent is killed. It runs inside
vLLM's process and imports nothing of raytide.

Without this extension, vLLM's processes would outlive a killed parent, with all their memory. vLLM imports the module
before it starts the worker's device and process group. A worker that still waits for the other workers therefore ends
as well.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import signal
import threading


class EndsWithParent:
    """An empty class, which vLLM's option `worker_extension_cls` adds to its worker. To add the class, vLLM imports
    this module. The import starts a thread that kills the worker's process when the parent process ends.
    """


def _kill_when_it_ends(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


if (_parent := multiprocessing.parent_process()) is not None:
    threading.Thread(target=_kill_when_it_ends, args=(_parent,), name="ends-with-parent", daemon=True).start()
