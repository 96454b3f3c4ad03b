"""The images are in step with pyproject.toml and constraints.txt, and their list of contents is right.

tests/soak/test_image_real.py builds the one for CPU and runs the demo in it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "deploy" / "images"
BASES = ("cpu", "cuda", "rocm")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
)


def text(name: str) -> str:
    return (IMAGES / name).read_text()


def test_the_extras_and_pythons_of_an_image_are_those_of_the_project() -> None:
    (installed,) = re.findall(r'"raytide\[([\w,]+)\]==\$\{VERSION\}"', text("Containerfile"))
    (collected,) = re.findall(r'"\$folder/source\[([\w,]+)\]"', text("build.sh"))
    assert installed == collected and set(installed.split(",")) <= set(PROJECT["optional-dependencies"])
    low, high = (tuple(map(int, bound.split("."))) for bound in re.findall(r"[\d.]+", PROJECT["requires-python"]))
    minors = [tuple(map(int, each.split("."))) for each in re.findall(r"minor=([\d.]+)", text("build.sh"))]
    assert len(minors) == 2 and all(low <= minor < high for minor in minors)


def test_versions_come_from_the_constraints_alone() -> None:
    names = {re.split(r"[\[<>=~; ]", each)[0].lower() for each in PROJECT["dependencies"]} | {
        "psycopg",
        "psycopg-binary",
    }
    assert names - {name.lower() for name in PINNED} == set()
    for name in ("Containerfile", "build.sh"):
        assert "--constraint" in text(name) and "constraints.txt" in text(name)
    for name in (path.name for path in IMAGES.iterdir()):
        assert [package for package in PINNED if f"{package}==" in text(name)] == [], name


def test_the_image_runs_without_root_and_the_container_installs_without_the_network() -> None:
    lines = text("Containerfile").splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users == ["1000:1000"]
    last_run = max(n for n, line in enumerate(lines) if line.startswith("RUN "))
    assert last_run < lines.index("USER 1000:1000")  # nothing is installed by a user, nothing is run as root
    assert "--no-index" in text("Containerfile") and "--no-cache-dir" in text("Containerfile")


def test_no_bytecode_of_the_image_has_a_time() -> None:
    pythons = [
        line
        for line in text("Containerfile").splitlines()
        if "/opt/raytide/bin/python " in line and "--python" not in line
    ]
    assert pythons and all("/opt/raytide/bin/python -B " in line for line in pythons)
    assert "--no-compile" in text("Containerfile") and "--invalidation-mode unchecked-hash" in text("Containerfile")


@pytest.mark.parametrize("base", BASES)
def test_a_base_has_a_fixed_tag_and_says_whether_it_was_ever_built(base: str) -> None:
    (image,) = re.findall(r"^FROM (\S+)$", text(f"{base}.Containerfile"), re.MULTILINE)
    if base == "cpu":
        assert image == "scratch"
        return
    name, _, tag = image.rpartition(":")
    assert "." in tag.split("-")[0] and "latest" not in tag and name.startswith("docker.io/")
    assert "Not built here" in text(f"{base}.Containerfile")


@pytest.mark.parametrize("base", BASES)
def test_every_base_has_what_ray_raytide_and_kuberay_s_probes_run(base: str) -> None:
    packages = text("build.sh" if base == "cpu" else f"{base}.Containerfile")
    for package in ("ca-certificates", "gcc", "libc6-dev", "procps", "python3-venv", "tini", "wget"):
        assert re.search(rf"[ ,=]{package}[ ,\n]", packages), package


def sbom(**environment: str) -> dict[str, Any]:
    command = [sys.executable, str(IMAGES / "sbom.py"), "raytide", "1.2.3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_sbom_lists_what_is_installed_and_is_the_same_twice() -> None:
    first = sbom(SOURCE_DATE_EPOCH="1767225600", PATH="/usr/bin:/bin")
    assert first == sbom(SOURCE_DATE_EPOCH="1767225600", PATH="/usr/bin:/bin")
    assert first["serialNumber"] != sbom(SOURCE_DATE_EPOCH="0", PATH="/usr/bin:/bin")["serialNumber"]
    assert first["metadata"]["timestamp"] == "2026-01-01T00:00:00+00:00"
    purls = [each["purl"] for each in first["components"]]
    assert len(purls) == len(set(purls))
    assert f"pkg:pypi/ray@{version('ray')}" in purls
    if Path("/var/lib/dpkg/status").exists():
        assert any(purl.startswith("pkg:deb/") and "/dpkg@" in purl for purl in purls)


def test_a_wrong_device_is_told_what_there_is() -> None:
    done = subprocess.run([str(IMAGES / "build.sh"), "tpu"], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (1, "build.sh: give a device: cpu, cuda or rocm\n")
