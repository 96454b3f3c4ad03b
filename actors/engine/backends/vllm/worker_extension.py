"""raytide's extension of vLLM's worker, which ends the worker's process when its parent is killed. It runs inside
vLLM's process and imports nothing of raytide.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading


class EndsWithParent:
    """Ends vLLM's worker when its parent process ends.

    vLLM mixes this class into its worker, as the option `worker_extension_cls` says.
    """

    def end_with_parent(self) -> None:
        """Makes the kernel kill this process when its parent ends: otherwise vLLM's core would outlive a killed parent,
        with all its memory.
        """
        parent = multiprocessing.parent_process()
        assert parent is not None

        def watch() -> None:
            parent.join()
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, name="ends-with-parent", daemon=True).start()
