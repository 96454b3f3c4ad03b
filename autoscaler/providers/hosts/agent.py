"""The agent on one of the operator's own machines. It is started anew for each request, reads one JSON object from
stdin and answers with one JSON object on stdout.

Run as `python -m raytide.autoscaler.providers.hosts.agent`.

The request `start` starts a node, `list` returns the nodes that were started on this machine, and `end` ends a node.
Each node has a folder, in the format that the local provider also uses. The node's process holds a lock on the
folder, and the agent identifies the process by pid and start time. Therefore the agent ends only processes of nodes,
and every request can be repeated.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raytide.autoscaler.providers.local.files import LocalMachine, NodeFolder
from raytide.core.config import home, installed_version, raytide_version
from raytide.core.errors import ConflictError, ProviderError, RaytideError
from raytide.core.io.private_folder import private_folder
from raytide.core.io.process import Process, terminate_all

DIES_WITH_PARENT = "--dies-with-parent"
_KEPT_FOLDERS = 10
"""The folders of ended nodes, with their logs, that a machine keeps."""
_END_GRACE_S = 5.0
_LOG_BYTES = 2000


def versions() -> dict[str, str]:
    """Returns the versions that must be equal on the head and on a machine: Ray refuses a node with another version of
    Python or Ray.
    """
    return {
        "raytide": raytide_version(),
        "ray": installed_version("ray") or "none",
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def start(request: Mapping[str, Any]) -> dict[str, Any]:
    """Starts the node, unless it runs already, and returns its state. If other nodes of this cluster still run on this
    machine, the call ends them first.
    """
    check_versions(request["versions"])
    root, node_id = _root(request), str(request["node_id"])
    for folder in _folders(root):
        if folder.node_id != node_id:
            _end(folder, "another node took its machine")
    _remove_old(root)
    return start_in(root, request)


def start_in(root: Path, request: Mapping[str, Any], *, dies_with_caller: bool = False) -> dict[str, Any]:
    """Starts the node in its folder below `root`, unless it runs there already, and returns its state."""
    node_id = str(request["node_id"])
    folder = NodeFolder(root / node_id)
    folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.end() is not None:
        raise ConflictError(f"node {node_id} has already ended on this machine.", hint="Start one with another id.")
    lock = folder.take_lock()
    if lock is None:
        return _state(folder)
    try:
        folder.buy(_machine(request, root))
        _spawn(folder, lock, request, [DIES_WITH_PARENT] if dies_with_caller else [])
    finally:
        os.close(lock)
    return _state(folder)


def list_nodes(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state of each node of this cluster on this machine. If a node's process is gone, the node is shown as
    ended.
    """
    return {"nodes": {folder.node_id: _state(folder) for folder in _folders(_root(request))}}


def end(request: Mapping[str, Any]) -> dict[str, Any]:
    """Ends the node. Does nothing if the node has ended or was never started on this machine."""
    folder = NodeFolder(_root(request) / str(request["node_id"]))
    if folder.machine() is None:
        return {"is_running": False, "reason": "it was not started here"}
    _end(folder, "terminated")
    return _state(folder)


VERBS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {"start": start, "list": list_nodes, "end": end}


def check_versions(wanted: Mapping[str, str]) -> None:
    """Raises a ProviderError if this machine has other versions than the head. The error names the versions that
    differ.
    """
    here = versions()
    wrong = [f"{name} {here[name]} instead of {wanted[name]}" for name in wanted if here[name] != wanted[name]]
    if wrong:
        raise ProviderError(
            f"it has {', '.join(wrong)}.",
            hint="Install the head's versions for the interpreter of hosts.python (docs/providers.md).",
        )


def _end(folder: NodeFolder, reason: str) -> None:
    if folder.end() is not None:
        return
    folder.announce_end(reason)
    process = folder.process()
    if process is not None and folder.is_running():
        terminate_all([process], grace_s=_END_GRACE_S)
    folder.record_end(time.time())


def _state(folder: NodeFolder) -> dict[str, Any]:
    if folder.end() is None and folder.is_running():
        process = folder.process()
        return {
            "is_running": True,
            "reason": "",
            "pid": process.pid if process else 0,
            "start_time": process.start_time if process else 0,
        }
    return {"is_running": False, "reason": folder.record_end(time.time()).reason, "log": _log_tail(folder)}


def _machine(request: Mapping[str, Any], root: Path) -> LocalMachine:
    return LocalMachine(
        node_id=request["node_id"],
        node_type=request["node_type"],
        zone=request["zone"],
        price_micro_usd_h=0,  # the head has the bill
        started_at_s=time.time(),
        slot=os.getpid(),
        address=request["address"],
        resources=request["resources"],
        labels=request["labels"],
        gcs_address=request["gcs_address"],
        temp_dir=str(_temp_dir(root)),
    )


def _spawn(folder: NodeFolder, lock: int, request: Mapping[str, Any], options: Sequence[str]) -> None:
    environment = {**os.environ, **request["environment"], "SPT_NOENV": "1", "PYTHONUNBUFFERED": "1"}
    if token := request.get("ray_token"):
        file = folder.path / "ray_token"
        file.touch(mode=0o600)
        file.write_text(token)
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}
    process = folder.spawn("raytide.autoscaler.providers.hosts.node", lock, environment, options)
    if (identity := Process.of(process.pid, f"node {folder.node_id}")) is not None:
        folder.record_process(identity)


def _root(request: Mapping[str, Any]) -> Path:
    return home() / "hosts" / str(request["cluster_id"]) / str(request["host"])


def _temp_dir(root: Path) -> Path:
    """Returns a folder for Ray that only this user can enter. Its path is short, because the paths of unix sockets in
    it must be.
    """
    return private_folder("ray", hashlib.sha256(str(root).encode()).hexdigest()[:8])


def _folders(root: Path) -> list[NodeFolder]:
    return [NodeFolder(file.parent) for file in sorted(root.glob("*/machine.json"))]


def _remove_old(root: Path) -> None:
    ended = [(over.ended_at_s, folder) for folder in _folders(root) if (over := folder.end()) is not None]
    for _, folder in sorted(ended, key=lambda item: item[0])[:-_KEPT_FOLDERS]:
        shutil.rmtree(folder.path, ignore_errors=True)


def _log_tail(folder: NodeFolder) -> str:
    try:
        text = folder.log.read_text(errors="replace")[-_LOG_BYTES:]
    except OSError:
        return ""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def main() -> int:
    try:
        request = json.load(sys.stdin)
        answer = VERBS[request["verb"]](request)
    except RaytideError as error:
        answer = {"error": error.to_json()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        answer = {"error": ProviderError(f"{type(error).__name__}: {error}").to_json()}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
