"""The Slurm job of one node: `python -m raytide.autoscaler.providers.slurm.node REQUEST_FILE`.

The job starts the node's process and runs until that process ends. Slurm sends SIGTERM for a requeue, a cancellation
or the time limit. The job ignores this signal. The controller sees in `squeue` why Slurm ends the job, and moves
work to other nodes until Slurm sends SIGKILL, `KillWait` seconds later. SIGINT is the controller's own request to
end the node.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from raytide.autoscaler.providers.hosts.agent import check_versions, start_in
from raytide.autoscaler.providers.local.files import NodeFolder
from raytide.core.errors import ProviderError, RaytideError
from raytide.core.io.private_folder import private_folder
from raytide.core.io.process import Process

_SCONTROL_S = 10.0
_LOG_CHARACTERS = 4000


def own_address(gcs_address: str, machine: str) -> str:
    """Returns the IPv4 address of this machine. The address is the one that Slurm knows. If Slurm knows none, the
    address is the source address of the route to the head.
    """
    scontrol = shutil.which("scontrol") or "scontrol"
    try:
        shown = subprocess.run(
            [scontrol, "show", "node", "-o", machine],
            capture_output=True,
            text=True,
            timeout=_SCONTROL_S,
            check=False,
        ).stdout
        found = re.search(r"\bNodeAddr=(\S+)", shown)
        return str(ipaddress.IPv4Address(found[1] if found else ""))
    except (OSError, subprocess.TimeoutExpired, ValueError):
        host, _, port = gcs_address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        return str(probe.getsockname()[0])


def run(request: Mapping[str, Any], job: Mapping[str, str]) -> str:
    """Runs the node until it ends. Returns the last part of the node's log, followed by a line with the reason why the
    node ended.
    """
    check_versions(request["versions"])
    whole = {**request, "address": own_address(request["gcs_address"], job.get("SLURMD_NODENAME", ""))}
    name = hashlib.sha256(f"{request['cluster_id']} {request['node_id']}".encode()).hexdigest()[:8]
    root = private_folder("slurm", name)
    try:
        state = start_in(root, whole, dies_with_caller=True)
        folder = NodeFolder(root / request["node_id"])
        if not state["is_running"]:
            raise ProviderError(f"{state['reason']}: {state.get('log', '')}")
        process = Process(state["pid"], state["start_time"])

        def leave(signum: int, frame: FrameType | None) -> None:
            folder.announce_end("terminated")
            process.send(signal.SIGTERM)

        signal.signal(signal.SIGINT, leave)
        process.wait(None)
        reason = folder.record_end(time.time()).reason
        return f"{folder.log.read_text(errors='replace')[-_LOG_CHARACTERS:]}\n{reason}"
    finally:
        shutil.rmtree(root, ignore_errors=True)


def main(request_file: str) -> int:
    signal.signal(signal.SIGTERM, lambda *_: None)
    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
        return 0  # the node of this job ended when Slurm took it back
    code = 0
    try:
        text = run(json.loads(Path(request_file).read_text()), os.environ)
    except RaytideError as error:
        text, code = str(error), 1
    except (OSError, ValueError, KeyError) as error:
        text, code = f"{type(error).__name__}: {error}", 1
    sys.stdout.write(f"{text}\n")  # the log file of the job, whose last line the head shows
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
