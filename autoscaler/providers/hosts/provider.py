"""The provider that uses the operator's own machines as nodes. A launch takes a free machine and starts a raylet there
over ssh. When the node ends, the machine is free again.

The choice of a machine is recorded before anything runs there, so that a new controller finds the machine again. A
machine that fails goes into quarantine, and the node gets another machine. If a machine cannot be reached, its node is
recorded as ended. Processes that still run on that machine are ended before the machine becomes a node again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from raytide.autoscaler.providers.base import Machine, Provider
from raytide.autoscaler.providers.hosts.agent import versions
from raytide.autoscaler.providers.hosts.power import PowerSwitch
from raytide.autoscaler.providers.hosts.quarantine import HostQuarantine, quarantine_folder
from raytide.autoscaler.providers.hosts.ssh import HostConnection
from raytide.autoscaler.providers.local.node import RAYLET_ENDED
from raytide.autoscaler.providers.poll import PollWatcher
from raytide.autoscaler.providers.purchases import PurchaseRecord, Purchases, in_order
from raytide.core.clock import Clock
from raytide.core.errors import ClusterError, ProviderError, RaytideError
from raytide.core.io.atomic_file import read_json, write_json
from raytide.core.logs import logger
from raytide.core.objects.hardware.host import Host, HostsSection
from raytide.core.objects.node import Node, NodeType

HOSTS_FOLDER = "hosts"
"""The subfolder of the run folder with the purchases, the machine of each node, and the quarantine."""
NODE_ID_LABEL = "raytide.io/node-id"
_POLL_S = 3.0
_START_S, _LIST_S, _END_S = 60.0, 20.0, 60.0
_CLOSE_S = 10.0
_AT_ONCE = 32

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class _Binding:
    """The machine of a node, and the process that was started there."""

    host: str
    pid: int = 0
    start_time: int = 0

    @property
    def is_started(self) -> bool:
        return self.pid > 0


@dataclass(frozen=True, slots=True)
class _Failure:
    reason: str
    may_run: bool
    """True if the raylet may have been started."""


@dataclass(frozen=True, slots=True)
class HostCluster:
    """The addresses, variables and token with which a machine joins the cluster."""

    cluster_id: str
    gcs_address: str
    environment: Mapping[str, str]
    """Variables of the node's processes."""
    ray_token_file: Path | None = None

    def join_request(
        self, node_id: str, node_type: NodeType, zone: str, labels: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Returns the request that tells a machine to start this node. The request contains Ray's token."""
        file = self.ray_token_file
        return {
            "versions": versions(),
            "node_id": node_id,
            "node_type": node_type.name,
            "zone": zone,
            "resources": node_type.resources,
            "labels": {**labels, **node_type.all_labels(zone), NODE_ID_LABEL: node_id},
            "gcs_address": self.gcs_address,
            "environment": dict(self.environment),
            "ray_token": file.read_text().strip() if file is not None else "",
        }


class HostsProvider(Provider):
    """A provider that uses the operator's own machines. `run_dir` is the cluster's run folder.

    An earlier controller may have begun to start a node without finishing. If `starts_nodes` is True, this provider
    finishes the start.
    """

    def __init__(
        self,
        hosts: HostsSection,
        node_types: Iterable[NodeType],
        cluster: HostCluster,
        run_dir: Path,
        clock: Clock,
        connection: HostConnection,
        *,
        starts_nodes: bool = True,
    ) -> None:
        self._hosts, self._cluster, self._clock, self._connection = hosts, cluster, clock, connection
        self._by_name = {host.name: host for host in hosts.machines}
        self._types = {node_type.name: node_type for node_type in node_types}
        self._folder = run_dir / HOSTS_FOLDER
        self._purchases = Purchases(self._folder / "purchases")
        self._quarantine = HostQuarantine(quarantine_folder(run_dir), clock)
        self._power = PowerSwitch(hosts)
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(_AT_ONCE)
        self._at_work: dict[str, threading.Thread] = {}
        self._ending: set[str] = set()
        self._abandoned = {entry.host for entry in self._quarantine.all_held()}
        """Machines that may still run a raylet although its node has ended in the records."""
        self._silent: dict[str, str] = {}
        """Machines that did not answer the last request for their nodes, with the error."""
        self._bound: dict[str, _Binding] = {}
        """The bindings of nodes that have not ended."""
        for purchase in self._purchases.open():
            record = read_json(self._folder / f"{purchase.node_id}.json")
            self._bound[purchase.node_id] = _Binding("") if record is None else _Binding(**record)
        self._starts_nodes = starts_nodes
        self._on_change: Callable[[], None] = lambda: None
        self._watcher: PollWatcher | None = None

    def launch(self, node: Node, node_type: NodeType) -> None:
        with self._lock:
            if self._purchases.is_over(node.id):
                return
            if self._purchases.find(node.id) is None:
                self._purchases.check_room()
                self._bind(node.id, _Binding(self._free_host(node.type, node.zone).name))
                self._purchases.buy(node, self._clock.now_s())
            self._begin(node.id, self._start)

    def terminate(self, node_id: str) -> None:
        """Begins to end the node and returns at once. The machine is free again once its raylet has ended."""
        with self._lock:
            if self._purchases.find(node_id) is None or self._purchases.is_over(node_id):
                return
            self._ending.add(node_id)
            self._begin(node_id, self._end)

    def machines(self) -> tuple[Machine, ...]:
        with self._lock:
            over, purchases = self._purchases.over(), self._purchases.open()
            for purchase in purchases:
                node_id, bound = purchase.node_id, self._bound.get(purchase.node_id)
                # the planner ends a node whose type was removed
                is_due = bound is not None and not bound.is_started and purchase.node_type in self._types
                if self._starts_nodes and is_due and node_id not in self._ending:
                    self._begin(node_id, self._start)
        live = [purchase.machine(self._address(purchase.node_id)) for purchase in purchases]
        return in_order([*over, *live])

    def problems(self) -> tuple[str, ...]:
        """Returns one sentence for each machine in quarantine, and for each machine that has a node but does not
        answer.
        """
        silent = (f"{error} Its node goes on as long as Ray reaches it." for error in dict(self._silent).values())
        return (*(entry.describe() for entry in self._quarantine.all_held()), *silent)

    def watch(self, on_change: Callable[[], None]) -> None:
        """Starts a thread that checks the machines every three seconds. On each machine with a node, it checks that the
        node's raylet runs.
        """
        self._on_change = on_change
        self._watcher = PollWatcher("hosts", _POLL_S, self.check_nodes, on_change)

    def close(self) -> None:
        self._power.close()
        if self._watcher is not None:
            self._watcher.close()
        deadline = time.monotonic() + _CLOSE_S
        for thread in list(self._at_work.values()):
            thread.join(max(0.0, deadline - time.monotonic()))
        self._connection.close()

    def check_nodes(self) -> frozenset[str]:
        """Finds the nodes whose raylets have ended, and records these nodes as ended. Ends raylets that still run on
        machines in quarantine. Returns the ids of all nodes that have not ended, including nodes that are still
        starting.
        """
        with self._lock:
            nodes = {bound.host: node_id for node_id, bound in self._bound.items() if bound.is_started}
        left = {entry.host for entry in self._quarantine.all_held()} & self._abandoned
        hosts = [self._by_name[name] for name in {*nodes, *left} if name in self._by_name]
        with ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="hosts") as pool:
            list(pool.map(lambda host: self._check_host(host, nodes.get(host.name, "")), hosts))
        for name in set(self._silent) - nodes.keys():
            self._silent.pop(name, None)
        return frozenset(self._bound)

    def _check_host(self, host: Host, node_id: str) -> None:
        try:
            states = self._request(host, "list", {}, _LIST_S)["nodes"]
            self._silent.pop(host.name, None)
            for other, state in states.items():
                if state["is_running"] and other not in self._bound:
                    self._request(host, "end", {"node_id": other}, _END_S)
            self._abandoned.discard(host.name)
            unknown = {"is_running": False, "reason": "its machine does not know it any more"}
            if node_id and not states.get(node_id, unknown)["is_running"]:
                self._lose(node_id, host, states.get(node_id, unknown))
        except (RaytideError, OSError) as error:
            self._silent[host.name] = str(error)

    def _lose(self, node_id: str, host: Host, state: Mapping[str, Any]) -> None:
        """Records the end of a node that ended without a request. A raylet that was drained ends by itself."""
        with self._lock:
            if node_id in self._ending or node_id not in self._bound:
                return
            self._ending.add(node_id)
            self._at_work[node_id] = threading.current_thread()
        try:
            reason, last_line = state["reason"], state.get("log", "")
            if reason != RAYLET_ENDED:
                self._quarantine.add(host.name, f"{node_id}: {reason}{f': {last_line}' if last_line else ''}.")
            self._power.off(host)  # until the end is recorded, no other node can have the machine
            with self._lock:
                self._record_end(node_id, f"{host.name}: {reason}")
        finally:
            self._ending.discard(node_id)

    def _begin(self, node_id: str, work: Callable[[str], None]) -> None:
        """Runs `work` in a thread, unless a thread already works for the node: the next tick calls this again."""
        running = self._at_work.get(node_id)
        if running is not None and running.is_alive():
            return
        thread = threading.Thread(target=work, args=(node_id,), name=f"host-{node_id}", daemon=True)
        self._at_work[node_id] = thread
        thread.start()

    def _start(self, node_id: str) -> None:
        """Starts the raylet on the node's machine; if that fails, on the next free machine, and so on."""
        purchase, bound = self._purchases.find(node_id), self._bound.get(node_id)
        while purchase is not None and bound is not None and not bound.is_started and node_id not in self._ending:
            failed = self._start_on(bound.host, purchase)
            if failed is None:
                break
            with self._lock:
                try:
                    if failed.may_run:
                        raise ProviderError(failed.reason)  # a second raylet must not have the same id
                    bound = _Binding(self._free_host(purchase.node_type, purchase.zone).name)
                    self._bind(node_id, bound)
                except ProviderError:
                    self._record_end(node_id, failed.reason)
                    break
        self._on_change()

    def _start_on(self, name: str, purchase: PurchaseRecord) -> _Failure | None:
        """Starts the raylet on this machine. Returns None, or the reason why the machine is in quarantine now.

        A start that is given up, or that the end of this controller breaks off, is no failure. The machine stays the
        node's, so that `_end` or the next controller finds it.
        """
        node_id, is_asked = purchase.node_id, False
        host = self._by_name.get(name)
        if host is None:
            return _Failure(f"machine {name} was removed from the configuration", may_run=False)
        try:
            reach = partial(self._request, host, "list", {}, _LIST_S)
            if not self._power.on(host, reach, lambda: node_id in self._ending):
                return None
            node_type = self._types[purchase.node_type]
            content = self._cluster.join_request(node_id, node_type, purchase.zone, host.labels)
            self._request(host, "list", {}, _LIST_S)
            if node_id in self._ending:
                return None
            is_asked = True
            answer = self._request(host, "start", content, _START_S)
            if not answer["is_running"]:
                raise ProviderError(f"host {host.name}: {answer['reason']}: {answer.get('log', '')}")
            bound = _Binding(host.name, answer["pid"], answer["start_time"])
            self._bind(node_id, bound)
        except (RaytideError, OSError) as error:
            log.warning("a host failed", extra={"host": host.name, "node": node_id, "error": str(error)})
            may_run = is_asked and not isinstance(error, ProviderError)
            if may_run:
                self._abandoned.add(host.name)
            self._quarantine.add(host.name, str(error))
            return _Failure(str(error), may_run)
        self._quarantine.succeed(host.name)
        return None

    def _end(self, node_id: str) -> None:
        """Ends the node's processes on its machine. A machine that cannot be reached goes into quarantine."""
        bound = self._bound.get(node_id)
        host = self._by_name.get(bound.host) if bound is not None else None
        reason = "terminated"
        if host is not None:
            try:
                self._request(host, "end", {"node_id": node_id}, _END_S)
                self._power.off(host)
            except ClusterError as error:
                if bound is not None and not bound.is_started:
                    self._power.off(host)  # it may still boot
                self._abandoned.add(host.name)
                self._quarantine.add(host.name, str(error))
                reason = f"terminated; {error}"
            except ProviderError as error:
                if self._quarantine.held(host.name) is None:
                    self._quarantine.add(host.name, str(error))
                log.warning("a host does not end its node", extra={"host": host.name, "error": str(error)})
                return  # the next tick repeats it
        with self._lock:
            self._record_end(node_id, reason)
        self._on_change()

    def _request(self, host: Host, verb: str, content: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        body = {**content, "cluster_id": self._cluster.cluster_id}
        with self._places:
            return self._connection.request(host, verb, body, timeout_s=timeout_s)

    def _free_host(self, node_type: str, zone: str) -> Host:
        """Returns the first machine of this type and zone, in the order of the file, that has no node."""
        taken = {bound.host for bound in self._bound.values()}
        zones = self._types[node_type].zones
        here = [host for host in self._hosts.of_type(node_type) if (host.zone or zones[0]) == zone]
        held = {entry.host for entry in self._quarantine.all_held()} & {host.name for host in here}
        free = next((host for host in here if host.name not in taken | held), None)
        if free is not None:
            return free
        why = f": {', '.join(sorted(held))} in quarantine" if held else ""
        raise ProviderError(
            f"none of the {len(here)} machines of {node_type} in {zone} is free{why}.",
            hint="`raytide status` shows why, `raytide nodes release HOST` ends a quarantine." if held else "",
        )

    def _bind(self, node_id: str, bound: _Binding) -> None:
        write_json(self._folder / f"{node_id}.json", asdict(bound))
        self._bound[node_id] = bound

    def _record_end(self, node_id: str, reason: str) -> None:
        """Needs the lock: the controller's thread goes through the bindings meanwhile."""
        self._purchases.end(node_id, self._clock.now_s(), reason)
        self._bound.pop(node_id, None)
        self._ending.discard(node_id)
        self._at_work.pop(node_id, None)

    def _address(self, node_id: str) -> str:
        bound = self._bound.get(node_id)
        host = self._by_name.get(bound.host) if bound is not None else None
        return "" if host is None else host.address
