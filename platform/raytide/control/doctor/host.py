"""Checks over ssh whether one of the operator's own machines can be a node (`raytide doctor HOST`). The checks change
nothing."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from raytide.autoscaler.providers.hosts import probe
from raytide.autoscaler.providers.hosts.agent import versions
from raytide.autoscaler.providers.hosts.ssh import SshConnection
from raytide.control.bootstrap.cluster_record import RunningCluster, load, run_dir_of
from raytide.control.doctor.machine import Finding, Status, finding, podman_finding
from raytide.core.errors import ClusterError, NotFoundError, ProviderError
from raytide.core.objects.cluster_config import ClusterConfig, load_cluster
from raytide.core.objects.hardware.host import Host, HostsSection
from raytide.core.objects.node import NodeType

Facts = Mapping[str, Any]

_TIMEOUT_S = 90.0
_GIB = 1 << 30
_DISK_BYTES, _SHM_SHARE, _SHM_BYTES = 20 * _GIB, 0.1, _GIB
_OPEN_FILES, _PROCESSES = 65_536, 16_384
_CLOCK_WARN_S, _CLOCK_FAIL_S = 0.5, 5.0
_DRIVER = (525, 60)
"""The oldest NVIDIA driver that runs CUDA 12, as major and minor version."""
_HOT_C = 90.0
_OPEN = "Open this port of the head for the machine (docs/security.md)."


def check_host(name: str, config_path: Path | None = None, cluster: str = "local") -> list[Finding]:
    """Returns the findings about one of the operator's own machines. `name` is the machine's name in the cluster.yaml
    at `config_path`.

    The default of `config_path` is the file of the cluster with the name `cluster`. If the cluster of the file is up,
    the machine must be able to reach the cluster's ports.
    """
    recorded = load(run_dir_of(cluster))
    path = config_path or (recorded.config_path if recorded is not None else None)
    if path is None:
        raise NotFoundError(
            f"there is no cluster {cluster} on this machine.",
            hint="Give the file: `raytide doctor HOST --config FILE`.",
        )
    config = load_cluster(path)
    hosts, host = _find(config, name)
    is_another = config_path is not None and recorded is not None and recorded.name != config.name
    running = None if recorded is None or is_another or not recorded.client_file.exists() else recorded
    expected = next(each for each in config.node_types if each.name == host.node_type)
    connection = SshConnection(hosts, f"doctor {config.name}")
    try:
        facts, seconds_ahead, uncertain_s = _probe(connection, hosts, host, _ports(running))
    except ClusterError as error:
        return [Finding("ssh", "fail", error.message, error.hint)]
    except ProviderError as error:
        return [
            Finding("ssh", "ok", f"{host.address} answers"),
            Finding("python", "fail", error.message, error.hint),
        ]
    finally:
        connection.close()
    return findings_of(host, expected, facts, versions(), seconds_ahead, uncertain_s)


def findings_of(
    host: Host,
    node_type: NodeType,
    facts: Facts,
    wanted: Mapping[str, str],
    seconds_ahead: float,
    uncertain_s: float,
) -> list[Finding]:
    """Returns the findings about the machine `host`. `seconds_ahead` says how far the clock of `host` is ahead of the
    local clock, with an error of at most `uncertain_s`."""
    gpus = int(node_type.resources.get("GPU", 0))
    found = [
        Finding("ssh", "ok", f"{host.address} answers"),
        *_versions(facts, wanted),
        _size(facts, node_type),
        _clock(seconds_ahead, uncertain_s),
        *(_disk(path, free) for path, free in sorted(facts["free_bytes"].items())),
        _shared_memory(facts),
        _limit("open files", facts["limits"]["open files"], _OPEN_FILES),
        _limit("processes", facts["limits"]["processes"], _PROCESSES),
        podman_finding(facts["podman"], facts["podman_driver"], is_root=facts["is_root"]),
        *(finding(f"head {port}", not why, "reached", why, _OPEN) for port, why in facts["ports"].items()),
    ]
    return found + (_gpu_findings(facts, gpus) if gpus else [])


def _probe(
    connection: SshConnection, hosts: HostsSection, host: Host, ports: Iterable[str]
) -> tuple[Facts, float, float]:
    """Returns the machine's facts, the seconds that its clock is ahead of this machine's, and their uncertainty: half
    of the round trip."""
    source = Path(probe.__file__).read_text()
    command = f"exec {hosts.python} - {shlex.quote(json.dumps(list(ports)))}"
    connection.run(host, "true", timeout_s=_TIMEOUT_S)  # so that the login is not part of the clock's uncertainty
    before_s = time.time()
    output = connection.run(host, command, source, timeout_s=_TIMEOUT_S)
    after_s = time.time()
    try:
        facts: Facts = json.loads(output.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise ProviderError(
            f"host {host.name} answered {output.strip()[-200:]!r}.", hint="Its shell must print nothing for a command."
        ) from None
    ahead_s = facts["time_s"] - (before_s + after_s) / 2
    return facts, ahead_s, (after_s - before_s) / 2


def _versions(facts: Facts, wanted: Mapping[str, str]) -> list[Finding]:
    mend = "Install the head's versions for the interpreter of hosts.python (docs/providers.md)."
    have = {**facts["versions"], "python": ".".join(facts["python"].split(".")[:2])}
    found = []
    for name, version in wanted.items():
        here = have.get(name) or ("0+checkout" if name == "raytide" and version == "0+checkout" else "")
        detail = here or "not installed"
        found.append(finding(name, here == version, detail, f"{detail}, the head has {version}", mend))
    return found


def _size(facts: Facts, node_type: NodeType) -> Finding:
    cpus, memory = node_type.resources.get("CPU", 0), node_type.resources.get("memory", 0)
    detail = f"{facts['cpus']} CPUs, {facts['memory_bytes'] / _GIB:.1f} GiB"
    is_fine = facts["cpus"] >= cpus and facts["memory_bytes"] >= memory
    otherwise = f"{detail}, node type {node_type.name} promises more"
    return finding("size", is_fine, detail, otherwise, "Correct the type's resources.", status="warn")


def _clock(seconds_ahead: float, uncertain_s: float) -> Finding:
    off_s = max(0.0, abs(seconds_ahead) - uncertain_s)
    fine = f"the head's, within {abs(seconds_ahead) + uncertain_s:.1f} s"
    otherwise = f"{abs(seconds_ahead):.1f} s {'ahead of' if seconds_ahead > 0 else 'behind'} the head"
    status: Status = "fail" if off_s >= _CLOCK_FAIL_S else "warn"
    return finding("clock", off_s < _CLOCK_WARN_S, fine, otherwise, "Run chrony or ntpd there.", status=status)


def _disk(path: str, free: int) -> Finding:
    fine, otherwise = (f"{free / _GIB:.{digits}f} GiB free in {path}" for digits in (0, 1))
    mend = "Make room: checkpoints, packages and spilled objects go there."
    return finding("disk", free >= _DISK_BYTES, fine, otherwise, mend, status="fail" if free < _GIB else "warn")


def _shared_memory(facts: Facts) -> Finding:
    free, wanted = facts["shm_bytes"], max(_SHM_BYTES, _SHM_SHARE * facts["memory_bytes"])
    mend = f"`mount -o remount,size={wanted / _GIB:.0f}G /dev/shm`: Ray's objects and NCCL's buffers are there."
    detail = f"{free / _GIB:.1f} GiB free"
    return finding("shared memory", free >= wanted, detail, detail, mend, status="warn" if free else "fail")


def _limit(name: str, have: int, wanted: int) -> Finding:
    mend = f"Set a soft limit of {wanted} for the user in /etc/security/limits.d."
    fine = "unlimited" if have < 0 else str(have)
    return finding(name, have < 0 or have >= wanted, fine, f"limit {have}", mend, status="warn")


def _gpu_findings(facts: Facts, wanted: int) -> list[Finding]:
    rows = _rows(facts["gpus"])
    if not rows:
        mend = "Install NVIDIA's driver there, and see that `nvidia-smi` works as this user."
        return [Finding("driver", "fail", f"nvidia-smi shows no GPU, {wanted} are expected", mend)]
    driver = rows[0][2]
    is_new = tuple(int(part) for part in driver.split(".")[:2] if part.isdigit()) >= _DRIVER
    too_old = f"{driver} is older than {'.'.join(map(str, _DRIVER))}"
    too_few = f"{len(rows)}, the node type has {wanted}"
    look = "One may have fallen off the bus: see `dmesg` there, or correct the type's resources."
    found = [
        finding("driver", is_new, driver, too_old, "Update NVIDIA's driver: CUDA 12 needs it."),
        finding("GPUs", len(rows) == wanted, f"{len(rows)} x {rows[0][1]}", too_few, look),
        finding("NCCL", bool(facts["nccl"]), facts["nccl"], "not found", "Install torch for CUDA, or libnccl2, there."),
    ]
    sick = [f"GPU {row[0]} has {row[1]} uncorrected ECC errors" for row in _rows(facts["ecc"]) if _is_above(row[1], 0)]
    sick += [f"GPU {row[0]} is slowed down by its hardware" for row in _rows(facts["slowdown"]) if row[1] == "Active"]
    sick += [f"GPU {row[0]} has {row[3]} degrees" for row in rows if _is_above(row[3], _HOT_C)]
    sick += [line.strip()[-120:] for line in facts["xids"] or ()]
    if not sick:
        return [*found, Finding("GPU health", "ok", "no errors" + (", kernel log unread" * (facts["xids"] is None)))]
    mend = "Reset or replace it; `raytide nodes quarantine HOST` keeps the machine out meanwhile."
    return [*found, *(Finding("GPU health", "fail", text, mend) for text in sick)]


def _rows(lines: Iterable[str] | None) -> list[list[str]]:
    """Returns the cells of nvidia-smi's output by row; no row without nvidia-smi, or if the output has another form."""
    rows = [[cell.strip() for cell in line.split(",")] for line in lines or ()]
    return [row + [""] * (4 - len(row)) for row in rows if len(row) >= 2 and row[0].isdigit()]


def _is_above(text: str, bound: float) -> bool:
    """Returns whether the number in the text exceeds the bound; False for a value that the board lacks (`[N/A]`)."""
    try:
        return float(text) > bound
    except ValueError:
        return False


def _find(config: ClusterConfig, name: str) -> tuple[HostsSection, Host]:
    hosts = config.settings.hosts
    known = {host.name: host for host in hosts.machines} if hosts is not None else {}
    if hosts is None or name not in known:
        raise NotFoundError(
            f"cluster {config.name} has no own machine {name}.",
            hint=f"There are: {', '.join(sorted(known)[:20]) or 'none'} (metadata.raytide.hosts).",
        )
    return hosts, known[name]


def _ports(running: RunningCluster | None) -> list[str]:
    """Returns the head's addresses (HOST:PORT) that every node must reach; none if no cluster runs."""
    return [] if running is None else [running.gcs_address, running.api_url.removeprefix("http://")]
