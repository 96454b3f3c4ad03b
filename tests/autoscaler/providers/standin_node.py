"""A node without Ray: it keeps its lock, and has a child that left its session, as a worker's child may."""

import os
import signal
import subprocess
import sys

if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[2]), False)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    os.write(1, b"up")
    while True:
        signal.pause()
