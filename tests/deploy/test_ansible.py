"""Ansible installs raytide on own machines, which are real sshd processes, and a second run changes nothing.

The wheel is a small one of raytide's name, as raytide's own has 2 GB of dependencies.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from tests.sshd_fixture import SshdHosts, sshd_hosts

from raytide.core.objects.cluster_config import load_cluster

ROOT = Path(__file__).resolve().parents[2]
ANSIBLE = ROOT / "deploy" / "ansible"
TOOL = Path(sys.prefix) / "tools" / "ansible"
RECAP = re.compile(r"^(\w+) +: ok=\d+ +changed=(\d+) +unreachable=(\d+) +failed=(\d+)", re.MULTILINE)


def cluster_file(hosts: SshdHosts, path: Path, *machines: int) -> Path:
    node_type = {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 2}
    section = hosts.section(*machines) | {"python": "~/venv/bin/python"}
    file = {
        "cluster_name": "lab",
        "max_workers": 2,
        "provider": {"type": "hosts"},
        "head_node_type": "head",
        "available_node_types": {"head": {"resources": {}, "node_config": {}, "max_workers": 0}, "own": node_type},
        "metadata": {"raytide": {"version": 1, "node_types": {"own": {"power_w": 100}}, "hosts": section}},
    }
    path.write_text(yaml.safe_dump(file))
    load_cluster(path)
    return path


def play(cluster: Path, home: Path, wheel: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the playbook as docs/providers.md has it, without a setting of this machine."""
    if not TOOL.exists():
        pytest.skip("there is no ansible-core here: `./dev setup` fetches it")
    home.mkdir(exist_ok=True)
    given = {"wheel": str(wheel), "ansible_ssh_transfer_method": "piped", "raytide_python": sys.executable, **variables}
    given["ansible_python_interpreter"] = sys.executable
    command = [
        sys.executable,
        "-m",
        "ansible",
        "playbook",
        "-i",
        str(ANSIBLE / "inventory.py"),
        "-e",
        json.dumps(given),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    environment |= {"PYTHONPATH": str(TOOL), "CLUSTER": str(cluster), "HOME": str(home), "LC_ALL": "C.UTF-8"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    with TemporaryDirectory() as sockets:  # a path below `home` may be too long for one
        return subprocess.run(
            [*command, str(ANSIBLE / "install.yaml"), *arguments],
            env=environment | {"ANSIBLE_SSH_CONTROL_PATH_DIR": sockets},
            cwd=home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )


def recap(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """Returns the number of changes on each machine, all of which were reached and did not fail."""
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: [int(number) for number in numbers] for name, *numbers in RECAP.findall(done.stdout)}
    assert all(unreachable == failed == 0 for _, unreachable, failed in found.values())
    return {name: changed for name, (changed, _, _) in found.items()}


def small_wheel(folder: Path, answer: str) -> Path:
    """Writes a wheel raytide 0.1.0 without dependencies, whose `raytide` prints the answer."""
    folder.mkdir()
    path = folder / "raytide-0.1.0-py3-none-any.whl"
    info = "raytide-0.1.0.dist-info"
    files = {
        "raytide.py": f"def main():\n    print({answer!r})\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: raytide\nVersion: 0.1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nraytide = raytide:main\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in [*files.items(), (f"{info}/RECORD", record)]:
            archive.writestr(name, text)
    return path


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SshdHosts]:
    with sshd_hosts(tmp_path / "hosts") as started:
        for n in (1, 2):
            started.start(n, PYTHONPATH="")
        yield started


def answer_of(hosts: SshdHosts, n: int) -> str:
    command = [str(hosts.home(n) / "venv" / "bin" / "raytide")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300).stdout


@pytest.mark.soak
def test_a_second_run_changes_nothing_and_another_build_of_the_version_replaces_the_first(
    hosts: SshdHosts, tmp_path: Path
) -> None:
    cluster = cluster_file(hosts, tmp_path / "lab.yaml", 1, 2)
    first, second = small_wheel(tmp_path / "first", "first build"), small_wheel(tmp_path / "second", "second build")
    assert min(recap(play(cluster, tmp_path / "home", first)).values()) > 0
    assert recap(play(cluster, tmp_path / "home", first)) == {"h1": 0, "h2": 0}
    assert [answer_of(hosts, n) for n in (1, 2)] == ["first build\n"] * 2

    # one machine alone gets the next build, which is cut before it is installed, and then is
    limit = ("--limit", "h1")
    cut = play(cluster, tmp_path / "home", second, *limit, raytide_pip_arguments="--no-such-option")
    assert cut.returncode != 0 and "no such option" in cut.stdout
    assert recap(play(cluster, tmp_path / "home", second, *limit))["h1"] > 0
    assert [answer_of(hosts, n) for n in (1, 2)] == ["second build\n", "first build\n"]


@pytest.mark.soak
def test_a_machine_without_a_fitting_python_is_told_what_to_do(hosts: SshdHosts, tmp_path: Path) -> None:
    cluster = cluster_file(hosts, tmp_path / "lab.yaml", 1)
    wheel = small_wheel(tmp_path / "wheel", "")
    done = play(cluster, tmp_path / "home", wheel, raytide_python="python9.9")
    assert done.returncode != 0
    assert "python9.9 is no Python 3.11, 3.12 or 3.13 with venv" in done.stdout
    assert not (hosts.home(1) / "venv").exists()


def inventory(path: Path, cluster: str | None) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": "/nowhere"} | ({"CLUSTER": cluster} if cluster else {})
    command = [sys.executable, str(ANSIBLE / "inventory.py"), "--list"]
    return subprocess.run(command, env=environment, cwd=path, capture_output=True, text=True, timeout=300, check=False)


def test_the_inventory_is_that_of_the_cluster_s_file(tmp_path: Path) -> None:
    done = inventory(ROOT / "examples", "hosts.yaml")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    section = load_cluster(ROOT / "examples" / "hosts.yaml").settings.hosts
    assert section is not None
    expected = {each.name: (each.address, section.ssh.user, section.ssh.port) for each in section.machines}
    given = found["_meta"]["hostvars"]
    assert {name: tuple(given[name].values()) for name in found["all"]["hosts"]} == expected
    assert found["all"]["vars"]["raytide_venv"] == str(Path(section.python).parents[1])
    assert found["all"]["vars"]["ansible_ssh_private_key_file"] == "/nowhere/.ssh/id_ed25519"


@pytest.mark.parametrize(("cluster", "says"), [(None, "set CLUSTER"), ("../cluster.yaml", "names no own machines")])
def test_an_inventory_of_nothing_says_what_is_missing(cluster: str | None, says: str) -> None:
    done = inventory(ROOT / "examples", cluster)
    assert done.returncode == 1 and says in done.stderr and "Traceback" not in done.stderr
