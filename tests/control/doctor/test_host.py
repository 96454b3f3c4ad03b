"""`raytide doctor HOST`: each fault of an own machine is named with how to mend it, over a real ssh too."""

from __future__ import annotations

import copy
import json
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.sshd_fixture import SshdHosts, sshd_hosts
from typer.testing import CliRunner

from raytide.autoscaler.providers.hosts.agent import versions
from raytide.cli.app import app
from raytide.control.bootstrap.cluster_record import HeadCluster
from raytide.control.doctor import host
from raytide.control.doctor.host import findings_of
from raytide.control.doctor.machine import Finding
from raytide.core.objects.hardware.host import Host
from raytide.core.objects.node import NodeType

GIB = 1 << 30
WANTED = {"raytide": "1.0", "ray": "2.60.0", "python": "3.12"}
HOST = Host(name="rack-1", address="10.0.0.1", node_type="l4")
TYPE = NodeType(name="l4", resources={"CPU": 16, "GPU": 2}, price_micro_usd_h=0)
WELL: dict[str, Any] = {
    "time_s": 0.0,
    "python": "3.12.4",
    "executable": "python",
    "versions": {"raytide": "1.0", "ray": "2.60.0", "torch": "2.9"},
    "free_bytes": {"/tmp": 200 * GIB},
    "shm_bytes": 32 * GIB,
    "limits": {"open files": 1 << 20, "locked memory": -1, "processes": -1},
    "cpus": 16,
    "memory_bytes": 64 * GIB,
    "ports": {"10.0.0.9:6379": ""},
    "nccl": "2.27.3",
    "xids": [],
    "podman": "podman version 5.4.0",
    "podman_driver": "overlay",
    "is_root": False,
    "gpus": ["0, NVIDIA L4, 570.12.01, 41", "1, NVIDIA L4, 570.12.01, 43"],
    "ecc": ["0, 0", "1, [N/A]"],
    "slowdown": ["0, Not Active", "1, Not Active"],
}


def findings(seconds_ahead: float = 0.0, **changes: Any) -> list[Finding]:
    return findings_of(HOST, TYPE, {**copy.deepcopy(WELL), **changes}, WANTED, seconds_ahead, 0.1)


def test_a_sound_machine_has_no_findings() -> None:
    found = findings()
    assert {finding.status for finding in found} == {"ok"}
    assert {"driver", "GPUs", "NCCL", "GPU health", "disk", "shared memory", "clock", "head 10.0.0.9:6379"} <= {
        finding.name for finding in found
    }


@pytest.mark.parametrize(
    ("changes", "name", "status", "detail"),
    [
        ({"gpus": None}, "driver", "fail", "shows no GPU, 2 are expected"),
        ({"gpus": ["0, NVIDIA L4, 470.82.01, 41"] * 2}, "driver", "fail", "470.82.01 is older than 525.60"),
        ({"gpus": WELL["gpus"][:1]}, "GPUs", "fail", "1, the node type has 2"),
        ({"nccl": ""}, "NCCL", "fail", "not found"),
        ({"ecc": ["0, 0", "1, 12"]}, "GPU health", "fail", "GPU 1 has 12 uncorrected ECC errors"),
        ({"slowdown": ["0, Active", "1, Not Active"]}, "GPU health", "fail", "GPU 0 is slowed down by its hardware"),
        ({"gpus": [WELL["gpus"][0], "1, NVIDIA L4, 570.12.01, 97"]}, "GPU health", "fail", "GPU 1 has 97 degrees"),
        ({"xids": ["NVRM: Xid (PCI:0000:81:00): 79, GPU has fallen off the bus."]}, "GPU health", "fail", "Xid"),
        ({"free_bytes": {"/tmp": GIB // 2}}, "disk", "fail", "0.5 GiB free in /tmp"),
        ({"free_bytes": {"/tmp": 5 * GIB}}, "disk", "warn", "5.0 GiB free in /tmp"),
        ({"shm_bytes": 64 << 20}, "shared memory", "warn", "0.1 GiB free"),
        ({"limits": {"open files": 1024, "processes": -1}}, "open files", "warn", "limit 1024"),
        ({"seconds_ahead": 90.0}, "clock", "fail", "90.0 s ahead of the head"),
        ({"seconds_ahead": -1.5}, "clock", "warn", "1.5 s behind the head"),
        ({"python": "3.9.2"}, "python", "fail", "3.9, the head has 3.12"),
        ({"versions": {"raytide": "", "ray": "2.60.0"}}, "raytide", "fail", "not installed, the head has 1.0"),
        ({"ports": {"10.0.0.9:6379": "timed out"}}, "head 10.0.0.9:6379", "fail", "timed out"),
        ({"is_root": True}, "podman", "warn", "Ray starts no containers as root"),
        ({"podman_driver": "vfs"}, "podman", "warn", "vfs, which copies the whole image for each worker"),
        ({"cpus": 8}, "size", "warn", "8 CPUs, 64.0 GiB, node type l4 promises more"),
    ],
)
def test_each_fault_is_the_only_finding_and_has_a_remedy(
    changes: dict[str, Any], name: str, status: str, detail: str
) -> None:
    (finding,) = [finding for finding in findings(**changes) if finding.status != "ok"]
    assert (finding.name, finding.status) == (name, status)
    assert detail in finding.detail
    assert finding.fix


def test_a_machine_without_podman_is_sound_and_says_what_it_cannot_run() -> None:
    (podman,) = [finding for finding in findings(podman="", podman_driver="", is_root=True) if finding.name == "podman"]
    assert (podman.status, podman.detail) == ("ok", "not installed: jobs that name an image fail here")


def test_a_clock_is_not_blamed_for_a_slow_connection() -> None:
    clock = findings_of(HOST, TYPE, WELL, WANTED, 3.0, 3.5)[5]
    assert (clock.name, clock.status) == ("clock", "ok")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshdHosts]:
    """A machine whose GPU tools are scripts with faults: one GPU of two, an old driver, ECC errors, Xid messages; and
    whose limit of open files is low."""
    folder = tmp_path_factory.mktemp("doctor")
    tools = folder / "tools"
    tools.mkdir()
    answers = {"index,name": "0, NVIDIA L4, 470.82.01, 41", "ecc": "0, 3", "slowdown": "0, Not Active"}
    cases = "".join(f"*{word}*) echo '{answer}' ;;\n" for word, answer in answers.items())
    scripts = {
        "nvidia-smi": f'case "$1" in\n{cases}esac\n',
        "dmesg": "echo 'NVRM: Xid (PCI:0000:81:00): 79, pid=1, GPU has fallen off the bus.'\n",
    }
    for name, text in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}")
        (tools / name).chmod(0o755)
    with sshd_hosts(folder / "hosts") as started:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        try:
            started.start(1, PATH=f"{tools}:/usr/bin:/bin")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        yield started


def file_of(hosts: SshdHosts, tmp_path: Path, **more: Any) -> Path:
    gpu = {"resources": {"CPU": 1, "GPU": 2}, "node_config": {}}
    file = {
        "cluster_name": "lab",
        "provider": {"type": "hosts"},
        "head_node_type": "head",
        "available_node_types": {"head": {"resources": {}, "node_config": {}}, "own": gpu},
        "metadata": {
            "raytide": {"node_types": {"own": {"price_usd_h": 0}}, "hosts": hosts.section(1, **more)},
        },
    }
    path = tmp_path / "lab.yaml"
    path.write_text(yaml.safe_dump(file))
    return path


def doctor(*args: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    done = CliRunner().invoke(app, ["doctor", *args, "--json"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    found: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(done.stdout):
        found.setdefault(finding["name"], []).append(finding)
    return done.exit_code, found


def test_six_faults_of_a_real_machine_are_found_over_ssh(
    hosts: SshdHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYTIDE_HOME", str(tmp_path / "home"))
    run_dir = tmp_path / "home" / "clusters" / "lab"
    run_dir.mkdir(parents=True)
    with socket.create_server((hosts.address(1), 0)) as gcs, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        closed_port = bound.getsockname()[1]
        lab = HeadCluster(
            name="lab",
            cluster_id="lab-1",
            run_dir=run_dir,
            gcs_address=f"{hosts.address(1)}:{gcs.getsockname()[1]}",
            dashboard_url="",
            api_url=f"http://127.0.0.1:{closed_port}",
            serve_url="",
            state_url="",
            config_path=file_of(hosts, tmp_path),
            created_at_s=0.0,
            version="",
        )
        lab.save()
        lab.client_file.touch()
        code, found = doctor("h1", "--cluster", "lab")
    assert code == 1
    faults = {name for name, all_of in found.items() if any(each["status"] == "fail" for each in all_of)}
    health = [each["detail"] for each in found["GPU health"]]
    assert found["driver"][0]["detail"] == "470.82.01 is older than 525.60"
    assert found["GPUs"][0]["detail"] == "1, the node type has 2"
    assert health[0] == "GPU 0 has 3 uncorrected ECC errors" and "fallen off the bus" in health[1]
    assert found["open files"][0]["detail"] == "limit 1024"
    assert "refused" in found[f"head 127.0.0.1:{closed_port}"][0]["detail"]
    assert {"driver", "GPUs", "GPU health", f"head 127.0.0.1:{closed_port}"} <= faults
    sound = {"ssh", "clock", *versions(), f"head {hosts.address(1)}:{gcs_port(found, hosts)}"}
    assert all(found[name][0]["status"] == "ok" for name in sound)


def gcs_port(found: dict[str, Any], hosts: SshdHosts) -> str:
    return next(name for name in found if name.startswith(f"head {hosts.address(1)}:")).rpartition(":")[2]


def test_ports_of_a_cluster_that_is_down_or_another_one_are_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYTIDE_HOME", str(tmp_path / "home"))
    asked = list[list[str]]()

    def probed(*args: Any) -> tuple[dict[str, Any], float, float]:
        asked.append(args[-1])
        return {**WELL, "ports": {}}, 0.0, 0.1

    monkeypatch.setattr(host, "_probe", probed)
    file = yaml.safe_load((Path(__file__).parents[3] / "examples" / "hosts.yaml").read_text())
    path = tmp_path / "hosts.yaml"
    path.write_text(yaml.safe_dump(file))
    name = file["metadata"]["raytide"]["hosts"]["machines"][0]["name"]
    fields = {"gcs_address": "10.0.0.9:6379", "api_url": "http://10.0.0.9:7400"}
    head = HeadCluster(
        name=file["cluster_name"],
        cluster_id="any-1",
        run_dir=tmp_path / "home" / "clusters" / file["cluster_name"],
        dashboard_url="",
        serve_url="",
        state_url="",
        config_path=path,
        created_at_s=0.0,
        version="",
        **fields,
    )
    head.run_dir.mkdir(parents=True)
    head.save()
    host.check_host(name, path, head.name)  # after `raytide down`, which keeps the record
    head.client_file.touch()
    host.check_host(name, path, head.name)
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump({**file, "cluster_name": "other"}))
    host.check_host(name, other, head.name)
    assert asked == [[], ["10.0.0.9:6379", "10.0.0.9:7400"], []]


def test_a_machine_that_cannot_be_reached_or_has_no_interpreter_is_one_finding(
    hosts: SshdHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYTIDE_HOME", str(tmp_path / "home"))
    code, found = doctor("h1", "--config", str(file_of(hosts, tmp_path, python="/nowhere/python")))
    assert (code, found["ssh"][0]["status"], found["python"][0]["status"]) == (1, "ok", "fail")
    file = yaml.safe_load(file_of(hosts, tmp_path).read_text())
    file["metadata"]["raytide"]["hosts"]["ssh"]["port"] = 1
    (tmp_path / "lab.yaml").write_text(yaml.safe_dump(file))
    code, found = doctor("h1", "--config", str(tmp_path / "lab.yaml"))
    assert (code, list(found), found["ssh"][0]["status"]) == (1, ["ssh"], "fail")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["h9", "--config", "lab.yaml"], "has no own machine h9. There are: rack-1"),
        (["h1", "--cluster", "none"], "there is no cluster none on this machine"),
        (["--config", "lab.yaml"], "--config needs a machine"),
    ],
)
def test_a_name_that_is_none_is_refused(
    args: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYTIDE_HOME", str(tmp_path / "home"))
    hosts = {"ssh": {"user": "ray"}, "machines": [HOST.model_dump(mode="json")]}
    file = yaml.safe_load((Path(__file__).parents[3] / "examples" / "hosts.yaml").read_text())
    file["available_node_types"] = {
        "head": {"resources": {}, "node_config": {}},
        "l4": {"resources": {}, "node_config": {}},
    }
    file["metadata"]["raytide"] |= {"node_types": {"l4": {"price_usd_h": 0}}, "hosts": hosts}
    (tmp_path / "lab.yaml").write_text(yaml.safe_dump(file))
    done = CliRunner().invoke(app, ["doctor", *args])
    assert done.exit_code != 0
    assert said in str(done.exception or "") + done.output
    assert os.listdir(tmp_path) == ["lab.yaml"]
