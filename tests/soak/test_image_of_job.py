"""A worker of Ray starts in the CPU image, by rootless podman, and runs a script there; one without an image is named.

It needs root, to build the image as `test_image_real.py` does and to become another user, Debian's podman, uidmap and
buildah, 15 GB of disk, a Python of the system with the image's version, and a kernel whose overlay file system a user
may mount (5.11 or newer). IMAGE_FOLDER keeps wheels and base for the next run. What this machine may lack is made in
namespaces of the test's own: the image's user, with ranges in /etc/subuid, a mount of cgroups in one version only, as
crun wants it, and a network with free ports.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.soak.test_image_real import BUILD, IMAGE, LONGEST_S, ROOT, run

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

PYTHON = "/usr/bin/python3"
WORKS = """
import os, sys
import ray
from raytide.actors.gang.member_processes import MemberProcesses, ProcessLaunch
from raytide.actors.gang.prepared_actor import PreparedActor

ray.init(num_cpus=1, include_dashboard=False, _temp_dir=sys.argv[1], object_store_memory=100 << 20)
actor_class = ray.remote(MemberProcesses)
start = lambda **environment: actor_class.options(num_cpus=0, **environment).remote()
try:
    PreparedActor(start, "DEFAULT", image="localhost/none:1").call("ping").result(600)
except Exception as error:
    print("refused", type(error).__name__, error)
actor = PreparedActor(start, "DEFAULT", image=sys.argv[2])
actor.call("ping").result(1800)
print("image", actor.image)
code = "import os, sys, raytide; print('inside', sys.prefix, os.getuid(), raytide.__file__)"
actor.call("start", None, (ProcessLaunch(0, ("python", "-c", code), {}),)).result(600)
exits = ()
while not exits:
    report = actor.call("report", 5.0).result(600)
    exits = report.exits
    for _, line in report.lines:
        print(line)
actor.kill()
"""
NAME, UID = "raytide", 1000
"""The user of raytide's image, who runs the node too."""
NAMESPACES = f"""
set -e
ip link set lo up
if mountpoint -q /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi
mkdir -p /dev/mqueue
for file in passwd group subuid subgid; do
  touch /etc/$file
  mount --bind "$0/$file" /etc/$file
done
exec setpriv --reuid {UID} --regid {UID} --init-groups "$@"
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Returns a folder with a short name that another user can enter, for the sockets of Ray."""
    path = Path(tempfile.mkdtemp(prefix="ioj", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def check_machine() -> None:
    if os.geteuid() != 0:
        pytest.skip("it builds an image and becomes another user, as root")
    for program in ("podman", "newuidmap", "buildah", "mmdebstrap", "unshare", "setpriv", "ip"):
        if shutil.which(program) is None:
            pytest.skip(
                f"there is no {program} here (Debian: apt-get install podman uidmap buildah mmdebstrap iproute2)"
            )
    version = run(dict(os.environ), PYTHON, "-c", "import sys; print(*sys.version_info[:2])").split()
    if version != [str(part) for part in sys.version_info[:2]]:
        pytest.skip(f"{PYTHON} is {'.'.join(version)}, and the packages here are another Python's")


def write_user(folder: Path, home: Path) -> Path:
    """Returns a folder with the machine's tables of users, in which the image's user has ranges for containers."""
    for name, entry in {"passwd": f"{NAME}:x:{UID}:{UID}::{home}:/bin/sh", "group": f"{NAME}:x:{UID}:"}.items():
        lines = [line for line in Path("/etc", name).read_text().splitlines() if f":{UID}:" not in line]
        (folder / name).write_text("\n".join([*lines, entry, ""]))
    for name in ("subuid", "subgid"):
        (folder / name).write_text(f"{NAME}:100000:65536\n")
    return folder


def test_a_worker_starts_in_the_cpu_image_and_runs_a_script_there(folder: Path) -> None:
    check_machine()
    store, home, tables = folder / "store.conf", folder / "home", folder / "tables"
    store.write_text(f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n')
    root = {
        **os.environ,
        "BUILDAH_ISOLATION": "chroot",
        "CONTAINERS_STORAGE_CONF": str(store),
        "PYTHON": sys.executable,
    }
    run(root, BUILD, "cpu", os.environ.get("IMAGE_FOLDER") or folder / "build")
    archive = folder / "image.tar"
    run(root, "buildah", "push", "-D", "-q", IMAGE, f"oci-archive:{archive}:{IMAGE}")
    archive.chmod(0o644)

    settings = home / ".config" / "containers"
    settings.mkdir(parents=True)
    (settings / "storage.conf").write_text('[storage]\ndriver = "overlay"\n')
    (settings / "containers.conf").write_text('[containers]\nnetns = "host"\n')
    for path in (home, *home.rglob("*")):
        os.chown(path, UID, UID)
    tables.mkdir()
    (folder / "works.py").write_text(WORKS)
    theirs = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TMPDIR": str(home),
        "PYTHONDONTWRITEBYTECODE": "1",
        "RAY_raylet_start_wait_time_s": "300",
        "RAY_worker_register_timeout_seconds": "600",  # of a machine that does much else
        "PYTHONPATH": f"{ROOT / 'platform'}:{sysconfig.get_path('purelib')}",
    }
    # podman leaves a process that keeps its namespaces, and all processes end with the first of theirs
    inside = (
        "unshare",
        "--mount",
        "--net",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "--propagation",
        "private",
    )
    inside += ("sh", "-c", NAMESPACES, str(write_user(tables, home)))
    script = f"podman load -q -i {archive} && exec {PYTHON} {folder / 'works.py'} {home / 'r'} {IMAGE}"
    done = subprocess.run(
        [*inside, "sh", "-c", script], env=theirs, capture_output=True, text=True, timeout=LONGEST_S, check=False
    )
    said = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert any(line.startswith("refused ConfigError the image localhost/none:1") for line in said), said
    assert any(line.startswith("image localhost/raytide@sha256:") for line in said), said
    (line,) = [line for line in said if line.startswith("inside ")]
    assert line.split()[1:3] == ["/opt/raytide", str(UID)] and line.split()[3].startswith("/opt/raytide/lib"), line
