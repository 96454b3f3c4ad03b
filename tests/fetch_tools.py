"""Fetches what tests need: Prometheus, Alertmanager, SIMDe, restic, sshd, Redis, Slurm, Ansible and Chromium.

`./dev setup` runs it. Debian's packages are unpacked into the venv instead of installed, because Prometheus,
Alertmanager, sshd and Slurm would run as services of this machine, and installing takes root. SIMDe is the headers that
emulate instructions which the processor lacks. Ansible comes from pip, into a folder of its own, as it has pins of its
own. Chromium is installed, which only root can do. A program that cannot be had is named in the file `missing`, and
its tests are skipped.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TOOLS = Path(sys.prefix) / "tools"
PACKAGES = {
    "prometheus": ("prometheus", "promtool"),
    "prometheus-alertmanager": ("alertmanager", "amtool"),
    "libsimde-dev": (),
    "restic": ("restic",),
}
WHOLE = ("restic",)
"""Programs that read no folders of their own, and that work in the caller's."""
ANSIBLE = "ansible-core==2.19.*"
MOVED = {
    b"/usr/share/prometheus/alertmanager": b"usr/share/prometheus/alertmanager/",
    b"/usr/share/prometheus/web/": b"usr/share/prometheus/web//",
}
"""The folders that the programs read, and paths of the same length that lead there from TOOLS."""
SSHD_PACKAGES = ("openssh-server", "libwrap0", "libnss-wrapper")
SSHD_FOLDER = (b"/run/sshd", b"/usr/sbin")
"""The folder of root that sshd enters before the login, which only an installed sshd has, and one that exists. The end
of its name is also that of the user that sshd becomes there, whom nss_wrapper makes up where sshd runs as root."""
SSHD_WRAPPER = """#!/bin/sh
tools=$(cd -- "${0%/*}/.." && pwd)
LD_LIBRARY_PATH=$(echo "$tools"/usr/lib/*-linux-gnu*)
export LD_LIBRARY_PATH
[ "$(id -u)" != 0 ] || export LD_PRELOAD="$LD_LIBRARY_PATH/libnss_wrapper.so"
exec "$tools/usr/sbin/sshd" "$@"
"""
REDIS_PACKAGES = ("redis-tools", "libjemalloc2", "liblzf1", "libatomic1")
"""The server is in the package of its tools, as a program that is known by its name: the package redis-server only
links to it."""
REDIS_WRAPPER = """#!/bin/sh
tools=$(cd -- "${0%/*}/.." && pwd)
LD_LIBRARY_PATH=$(echo "$tools"/usr/lib/*-linux-gnu*)
export LD_LIBRARY_PATH
exec "$tools/usr/bin/redis-server" "$@"
"""
SLURM_PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "libmunge2"),
    *("libhwloc15", "libjson-c5", "liblua5.1-0"),
)
SLURM_PROGRAMS = {
    **{name: f"usr/bin/{name}" for name in ("sbatch", "scancel", "scontrol", "sinfo", "squeue")},
    **{name: f"usr/sbin/{name}-wlm" for name in ("slurmctld", "slurmd", "slurmstepd")},
    "munged": "usr/sbin/munged",
}
SLURM_WRAPPER = """#!/bin/sh
tools=$(cd -- "${{0%/*}}/.." && pwd)
for folder in "$tools"/usr/lib/*-linux-gnu; do export LD_LIBRARY_PATH="$folder/slurm-wlm:$folder"; done
exec "$tools/{program}" "$@"
"""
WRAPPER = '#!/bin/sh\ncd -- "${{0%/*}}/.." && exec usr/bin/{program} "$@"\n'


def run(*command: str, cwd: Path | None = None) -> bool:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL).returncode == 0


def with_apt(*command: str, cwd: Path | None = None) -> bool:
    """Runs apt-get, a second time with new package lists if this user may fetch those."""
    if shutil.which("apt-get") is None:
        return False
    once = ("apt-get", *command)
    return run(*once, cwd=cwd) or (os.geteuid() == 0 and run("apt-get", "update") and run(*once, cwd=cwd))


def unpack_packages() -> bool:
    if not with_apt("download", *PACKAGES, cwd=TOOLS):
        return False
    for package in TOOLS.glob("*.deb"):
        if not run("dpkg-deb", "-x", str(package), str(TOOLS)):
            return False
        package.unlink()
    for folder in ("etc", "lib", "var", "usr/share/doc", "usr/share/man"):
        shutil.rmtree(TOOLS / folder, ignore_errors=True)
    programs = TOOLS / "usr" / "bin"
    (programs / "prometheus-alertmanager").rename(programs / "alertmanager")
    (TOOLS / "bin").mkdir()
    for names in PACKAGES.values():
        for name in names:
            if name in WHOLE:
                (TOOLS / "bin" / name).symlink_to(programs / name)
                continue
            move_folders(programs / name)
            wrapper = TOOLS / "bin" / name
            wrapper.write_text(WRAPPER.format(program=name))
            wrapper.chmod(0o755)
    asked = {name: "version" if name in WHOLE else "--version" for names in PACKAGES.values() for name in names}
    return all(run(str(TOOLS / "bin" / name), how) for name, how in asked.items())


def move_folders(program: Path) -> None:
    data = program.read_bytes()
    for path, here in MOVED.items():
        data = data.replace(path, here)
    program.write_bytes(data)


def unpack_folders(packages: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """Unpacks these folders of the packages beside what is in TOOLS already."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if not with_apt("download", *packages, cwd=folder):
            return False
        for package in folder.glob("*.deb"):
            if not run("dpkg-deb", "-x", str(package), str(folder / "unpacked")):
                return False
        for name in names:
            shutil.copytree(folder / "unpacked" / name, TOOLS / name, symlinks=True, dirs_exist_ok=True)
    return True


def write_wrapper(name: str, text: str, folder: str = "bin") -> None:
    wrapper = TOOLS / folder / name
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    wrapper.write_text(text)
    wrapper.chmod(0o755)


def unpack_sshd() -> bool:
    if not unpack_folders(SSHD_PACKAGES, ("usr/sbin", "usr/lib")):
        return False
    program = TOOLS / "usr" / "sbin" / "sshd"
    program.write_bytes(program.read_bytes().replace(*SSHD_FOLDER))
    write_wrapper("sshd", SSHD_WRAPPER)
    return shutil.which("ssh-keygen") is not None


def install_ansible() -> bool:
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-warn-conflicts", "--target", str(TOOLS / "ansible"))
    return run(*pip, ANSIBLE)


def unpack_redis() -> bool:
    if not unpack_folders(REDIS_PACKAGES, ("usr/bin", "usr/lib")):
        return False
    server = TOOLS / "usr" / "bin" / "redis-server"
    server.unlink(missing_ok=True)
    server.symlink_to("redis-check-rdb")
    write_wrapper("redis-server", REDIS_WRAPPER)
    return run(str(TOOLS / "bin" / "redis-server"), "--version")


def unpack_slurm() -> bool:
    """Unpacks Slurm and munge, with their programs in a folder of their own, named as elsewhere than in Debian."""
    if not unpack_folders(SLURM_PACKAGES, ("usr/bin", "usr/sbin", "usr/lib")):
        return False
    for name, program in SLURM_PROGRAMS.items():
        write_wrapper(name, SLURM_WRAPPER.format(program=program), "slurm")
    return all(run(str(TOOLS / "slurm" / name), "-V") for name in ("slurmctld", "slurmd", "munged"))


def install_chromium() -> bool:
    if any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        return True
    return os.geteuid() == 0 and with_apt("install", "-y", "--no-install-recommends", "chromium")


def main() -> None:
    shutil.rmtree(TOOLS, ignore_errors=True)
    TOOLS.mkdir()
    missing = []
    if not unpack_packages():
        shutil.rmtree(TOOLS)
        TOOLS.mkdir()
        debian = ", ".join(PACKAGES)
        missing.append(f"Prometheus, Alertmanager, SIMDe and restic (Debian: {debian})")
    if not unpack_sshd():
        missing.append("sshd (Debian: openssh-server, libwrap0, libnss-wrapper and openssh-client)")
    if not install_ansible():
        missing.append("ansible-core (pip)")
    if not unpack_redis():
        missing.append(f"Redis (Debian: {', '.join(REDIS_PACKAGES)})")
    if not unpack_slurm():
        missing.append(f"Slurm (Debian: {', '.join(SLURM_PACKAGES)})")
    if not install_chromium():
        missing.append("Chromium (Debian: apt-get install chromium)")
    if missing:
        (TOOLS / "missing").write_text(
            f"Their tests are skipped, as these cannot be fetched here: {', '.join(missing)}.\n"
        )


if __name__ == "__main__":
    main()
