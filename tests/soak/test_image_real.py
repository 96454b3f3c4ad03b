"""The CPU image is built twice from what is committed, is the same both times, and runs the demo as its own user.

It needs root for Debian's bootstrap and buildah's chroot, mmdebstrap and buildah (Debian's packages), 20 GB of disk,
and a registry of Python packages or the wheels in IMAGE_FOLDER, which also keeps wheels and base for the next run.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "deploy" / "images" / "build.sh"
IMAGE = "localhost/raytide:cpu"
LONGEST_S = 3600


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Returns the variables of a buildah with a storage of its own, which is removed at the end."""
    if os.geteuid() != 0:
        pytest.skip("building needs root here: mmdebstrap and buildah's chroot isolation")
    for program in ("buildah", "mmdebstrap", "unshare", "ip"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program} here (Debian: apt-get install buildah mmdebstrap iproute2)")
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the image's Python is 3.11, and its wheels are collected by one")
    settings = tmp_path / "storage.conf"
    settings.write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path / "graph"}"\nrunroot = "{tmp_path / "run"}"\n'
    )
    yield {
        **os.environ,
        "BUILDAH_ISOLATION": "chroot",
        "CONTAINERS_STORAGE_CONF": str(settings),
        "PYTHON": sys.executable,
    }
    shutil.rmtree(tmp_path)


def run(environment: dict[str, str], *command: str | Path) -> str:
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_two_builds_are_one_image_which_runs_the_demo_as_its_user(environment: dict[str, str], tmp_path: Path) -> None:
    folder = Path(os.environ.get("IMAGE_FOLDER") or tmp_path / "build")
    first, second = (run(environment, BUILD, "cpu", folder).split()[1] for _ in range(2))
    assert first == second and first.startswith("sha256:")

    container = run(environment, "buildah", "from", "--pull-never", IMAGE).strip()
    try:
        inside = ("buildah", "run", container, "--")
        assert run(environment, *inside, "id", "-u").strip() == "1000"
        assert run(environment, *inside, "raytide", "--version").startswith("raytide ")
        sbom = json.loads(run(environment, *inside, "cat", "/usr/share/raytide/sbom.cdx.json"))
        names = {part["name"] for part in sbom["components"]}
        assert {"ray", "torch", "raytide", "libc6", "python3"} <= names
        refused = subprocess.run([*inside, "touch", "/opt/raytide/mine"], env=environment, check=False, timeout=60)
        assert refused.returncode != 0
        demo = shlex.join([*inside, "raytide", "demo", "--json"])
        # chroot isolation shares the network, and with it the ports of every other Ray on this machine
        shown = json.loads(run(environment, "unshare", "--net", "sh", "-c", f"ip link set lo up && exec {demo}"))
        assert shown["problems"] == [] and shown["tokens"] > 0
    finally:
        run(environment, "buildah", "rm", container)
