"""raytide's extension of vLLM's worker: its process ends when its parent is killed. Runs inside vLLM's process, and
imports nothing of raytide.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading


class EndsWithParent:
    """Ends vLLM's worker when its parent process ends.

    Mixed into vLLM's worker by its `worker_extension_cls`.
    """

    def end_with_parent(self) -> None:
        """Kills this process when its parent ends: vLLM's core would outlive a killed parent, with all its memory."""
        parent = multiprocessing.parent_process()
        assert parent is not None

        def watch() -> None:
            parent.join()
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, name="ends-with-parent", daemon=True).start()
