"""Prints the contents of an image as a CycloneDX 1.6 document: Debian's packages and the distributions of this Python.

The program runs within the image, as `sbom.py NAME VERSION`, and needs only the standard library. Equal contents give
an equal document: its time is SOURCE_DATE_EPOCH, and its serial number is made from its components.
"""

import json
import os
import platform
import subprocess
import sys
import uuid
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

FIELDS = "${binary:Package}\\t${Version}\\t${Architecture}\\t${db:Status-Status}\\n"


def debian() -> list[dict[str, Any]]:
    system = platform.freedesktop_os_release()
    listed = subprocess.run(["dpkg-query", "-W", "-f", FIELDS], capture_output=True, text=True, check=True).stdout
    found = []
    for line in listed.splitlines():
        name, version, architecture, status = line.split("\t")
        if status != "installed":
            continue
        name = name.partition(":")[0]
        where = f"?arch={architecture}&distro={system['ID']}-{system['VERSION_ID']}"
        found.append(component(f"pkg:deb/{system['ID']}/{quote(name)}@{quote(version)}{where}", name, version))
    return found


def python() -> list[dict[str, Any]]:
    found = []
    for each in distributions():
        name, version = each.metadata["Name"], each.version
        purl = f"pkg:pypi/{quote(name.lower().replace('_', '-'))}@{quote(version)}"
        licence = each.metadata.get("License-Expression")
        found.append(component(purl, name, version) | ({"licenses": [{"expression": licence}]} if licence else {}))
    return found


def component(purl: str, name: str, version: str) -> dict[str, Any]:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def document(name: str, version: str, components: list[dict[str, Any]], made_at: int) -> dict[str, Any]:
    parts = sorted({each["bom-ref"]: each for each in components}.values(), key=lambda each: str(each["bom-ref"]))
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([name, version, made_at, parts]))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{number}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(made_at, UTC).isoformat(),
            "component": {"type": "container", "bom-ref": name, "name": name, "version": version},
        },
        "components": parts,
    }


def main() -> None:
    name, version = sys.argv[1:]
    components = python() + (debian() if Path("/var/lib/dpkg/status").exists() else [])
    made_at = int(os.environ.get("SOURCE_DATE_EPOCH") or 0)
    sys.stdout.write(json.dumps(document(name, version, components, made_at), indent=1) + "\n")


if __name__ == "__main__":
    main()
