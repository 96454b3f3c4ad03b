#!/usr/bin/env python3
"""Gives Ansible the machines that a cluster file lists, so that they are listed in only one place.

Run as `CLUSTER=hosts.yaml ansible-playbook -i inventory.py ...`. The program reads `metadata.raytide.hosts` as raytide
does. It needs only PyYAML, which is installed with Ansible.
"""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml


def inventory(hosts: dict[str, Any]) -> dict[str, Any]:
    """Returns Ansible's inventory of the machines in a `hosts` section. Its variable `raytide_venv` is the virtual
    environment that contains the section's `python`.
    """
    ssh = hosts["ssh"]
    known_hosts = Path(ssh.get("known_hosts", "~/.ssh/known_hosts")).expanduser()
    options = [
        "-F",
        "none",
        "-oStrictHostKeyChecking=yes",
        "-oIdentitiesOnly=yes",
        f"-oUserKnownHostsFile={known_hosts}",
    ]
    common = {
        "ansible_ssh_common_args": shlex.join(options),
        "ansible_ssh_private_key_file": str(Path(ssh.get("key", "~/.ssh/id_ed25519")).expanduser()),
        "raytide_venv": str(Path(hosts.get("python", "~/venv/bin/python")).parents[1]),
    }
    machines = {
        each["name"]: {
            "ansible_host": each["address"],
            "ansible_user": each.get("user") or ssh["user"],
            "ansible_port": each.get("port") or ssh.get("port", 22),
        }
        for each in hosts["machines"]
    }
    return {"all": {"hosts": list(machines), "vars": common}, "_meta": {"hostvars": machines}}


def main() -> None:
    path = os.environ.get("CLUSTER")
    if not path:
        sys.exit("inventory.py: set CLUSTER to the cluster's file, as in CLUSTER=hosts.yaml")
    hosts = yaml.safe_load(Path(path).read_text())["metadata"]["raytide"].get("hosts")
    if hosts is None:
        sys.exit(f"inventory.py: {path} has no metadata.raytide.hosts, so it names no own machines")
    json.dump(inventory(hosts), sys.stdout)


if __name__ == "__main__":
    main()
