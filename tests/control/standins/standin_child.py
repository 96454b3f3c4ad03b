"""A child that does nothing but hold its lock, as the real ones do."""

import signal
import sys
from pathlib import Path

from raytide.control.supervision.daemon import hold_lock

if __name__ == "__main__":
    with hold_lock(Path(sys.argv[1]) / "controller.lock"):
        signal.pause()
