"""The local provider. Each node is a real raylet with its agents and workers, in its own session.

A node has the loopback address 127.0.K.N, where K stands for the cluster and N for the node. Nodes outlive the provider
that launched them. The next provider reads everything from the run folder (files.py).
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from raytide.autoscaler.providers.base import Machine, Notice, Provider
from raytide.autoscaler.providers.local.events import Watcher, poke
from raytide.autoscaler.providers.local.files import LocalMachine, NodeFolder, node_names
from raytide.autoscaler.providers.local.spot import is_out_of_stock
from raytide.core.clock import Clock
from raytide.core.errors import ProviderError
from raytide.core.io.atomic_file import sweep
from raytide.core.io.process import Process, terminate_all
from raytide.core.logs import logger
from raytide.core.objects.node import Node, NodeType

NODE_ID_LABEL = "raytide.io/node-id"
log = logger(__name__)

_SLOTS = range(2, 255)  # 127.0.K.1 is the head's
_TERMINATE_GRACE_S = 3.0
"""The time that a node has to report its end to the GCS."""


class LocalProvider(Provider):
    """A provider whose machines are processes. `environment` holds the environment variables of these processes. If
    `environment` is None, these processes get the environment variables of the present process.

    `node_module` is the Python module that runs as a node's process. Its arguments are the node's folder and the
    file descriptor that holds the node's lock. Tests pass a module that needs less time and memory.
    """

    def __init__(
        self,
        run_dir: Path,
        gcs_address: str,
        k: int,
        clock: Clock,
        *,
        temp_dir: Path,
        environment: Mapping[str, str] | None = None,
        node_module: str = "raytide.autoscaler.providers.local.node",
    ) -> None:
        self._run_dir = run_dir.resolve()
        self._gcs_address = gcs_address
        self._k = k
        self._clock = clock
        self._temp_dir = temp_dir
        self._node_module = node_module
        self._environment = dict(os.environ if environment is None else environment)
        self._over: dict[str, Machine] = {}
        self._launching = threading.Lock()
        self._ending: dict[str, threading.Thread] = {}
        self._watcher: Watcher | None = None
        (self._run_dir / "nodes").mkdir(mode=0o700, parents=True, exist_ok=True)
        sweep(folder.path for folder in self._not_over())

    def launch(self, node: Node, node_type: NodeType) -> None:
        folder = NodeFolder(self._run_dir / "nodes" / node.id)
        with self._launching:
            if folder.end() is not None or folder.process() is not None:
                return
            if folder.machine() is None and is_out_of_stock(self._run_dir, node_type.name, node.zone):
                raise ProviderError(
                    f"no {node_type.name} to be had in {node.zone}: the pool is out of stock.",
                    hint="Another zone or node type may have some.",
                )
            folder.path.mkdir(mode=0o700, exist_ok=True)
            lock = folder.take_lock()
            if lock is None:
                return  # it runs: launched just before this provider's predecessor was killed
            try:
                folder.buy(self._purchase(node, node_type))
                self._spawn(folder, lock)
            finally:
                os.close(lock)

    def terminate(self, node_id: str) -> None:
        """Begins to end the node and returns. A thread kills the node's remaining processes within a few seconds."""
        folder = NodeFolder(self._run_dir / "nodes" / node_id)
        if folder.machine() is None or folder.end() is not None:
            return
        with suppress(OSError):  # a full disk keeps the reason from being written, not the node from being ended
            folder.announce_end("terminated")
        if (thread := self._ending.get(node_id)) is None or not thread.is_alive():
            thread = threading.Thread(target=self._end, args=(folder,), name=f"end-{node_id}", daemon=True)
            self._ending = {name: each for name, each in self._ending.items() if each.is_alive()}
            self._ending[node_id] = thread
            thread.start()

    def machines(self) -> tuple[Machine, ...]:
        found = dict(self._over)
        for folder in self._not_over():
            purchase, over = folder.machine(), folder.end()
            if purchase is None:
                continue
            if over is None:
                with self._launching:  # its lock is free for a moment while it is being launched
                    over = None if folder.is_running() else folder.record_end(self._clock.now_s())
            machine = Machine(
                node_id=purchase.node_id,
                node_type=purchase.node_type,
                zone=purchase.zone,
                price_micro_usd_h=purchase.price_micro_usd_h,
                started_at_s=purchase.started_at_s,
                ended_at_s=over.ended_at_s if over else None,
                address=purchase.address,
                meter=folder.meter(),
                reason=over.reason if over else "",
            )
            found[folder.node_id] = machine
            if over is not None:
                self._over[folder.node_id] = machine
        return tuple(sorted(found.values(), key=lambda machine: (machine.started_at_s, machine.node_id)))

    def notices(self) -> tuple[Notice, ...]:
        live = [folder for folder in self._not_over() if folder.end() is None]
        return tuple(Notice(folder.node_id, at) for folder in live if (at := folder.notice()) is not None)

    def _not_over(self) -> list[NodeFolder]:
        """Returns the folders of nodes whose end this process has not seen yet; a recorded end never changes."""
        names = set(node_names(self._run_dir)) - self._over.keys()
        return [NodeFolder(self._run_dir / "nodes" / name) for name in sorted(names)]

    def watch(self, on_change: Callable[[], None]) -> None:
        if self._watcher is not None:
            self._watcher.close()
        self._watcher = Watcher(self._run_dir, on_change)
        for folder in self._not_over():
            process = folder.process()
            if process is not None and folder.end() is None:
                self._watcher.add(process)

    def close(self) -> None:
        for thread in self._ending.values():
            thread.join()
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None

    def _purchase(self, node: Node, node_type: NodeType) -> LocalMachine:
        live = [folder for folder in self._not_over() if folder.end() is None]
        taken = {purchase.slot for folder in live if (purchase := folder.machine()) is not None}
        # addresses rotate, so that a new node does not reuse that of a node that has just ended
        turn = len(node_names(self._run_dir)) - 1  # its own folder is there already
        slots = [_SLOTS[(turn + i) % len(_SLOTS)] for i in range(len(_SLOTS))]
        free = next((slot for slot in slots if slot not in taken), None)
        if free is None:
            raise ProviderError(
                f"all {len(_SLOTS)} addresses 127.0.{self._k}.N are in use.", hint="End some nodes first."
            )
        return LocalMachine(
            node_id=node.id,
            node_type=node_type.name,
            zone=node.zone,
            price_micro_usd_h=node.price_micro_usd_h,
            started_at_s=self._clock.now_s(),
            slot=free,
            address=f"127.0.{self._k}.{free}",
            resources=dict(node_type.resources),
            labels={**node_type.all_labels(node.zone), NODE_ID_LABEL: node.id},
            gcs_address=self._gcs_address,
            temp_dir=str(self._temp_dir),
        )

    def _spawn(self, folder: NodeFolder, lock: int) -> None:
        process = folder.spawn(self._node_module, lock, self._environment)
        identity = Process.of(process.pid, f"node {folder.node_id}")
        threading.Thread(target=self._reap, args=(process, folder), name=f"reap-{folder.node_id}", daemon=True).start()
        if identity is not None:
            if self._watcher is not None:
                self._watcher.add(identity)
            folder.record_process(identity)

    def _reap(self, process: subprocess.Popen[bytes], folder: NodeFolder) -> None:
        process.wait()
        self._closing_entry(folder)

    def _end(self, folder: NodeFolder) -> None:
        process = folder.process()
        if process is not None:
            terminate_all([process], grace_s=_TERMINATE_GRACE_S)
        self._closing_entry(folder)

    def _closing_entry(self, folder: NodeFolder) -> None:
        try:
            folder.record_end(self._clock.now_s())
        except OSError as error:  # `machines` sees the end too, and records it when there is room
            log.warning("cannot record the end of a node", extra={"node": folder.node_id, "error": str(error)})
        poke(self._run_dir)
