"""Measures the time of raytide's backup of a cluster. For comparison, also measures a backup of the same files by
restic alone. First all files are backed up, then one more checkpoint.

Both sides ignore changed ctimes, because raytide makes links to the files, which changes their ctimes. For each
repetition, both sides get an empty repository and an empty cache. The two sides take turns at going first, so that
other work on the machine affects both equally. One repository is a copy of the other. The reason is that restic
chooses the cost of a new key by the present speed of the machine. Two separately created repositories would
therefore take different times to open.

    python benchmarks/backup/against_restic.py --gigabytes 2 --repetitions 3
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from raytide.actors.trainer.checkpoint import manifest
from raytide.actors.trainer.checkpoint.manifest import FileRecord, Manifest
from raytide.actors.trainer.checkpoint.storage import LocalStore
from raytide.control.backup.place import place_of
from raytide.control.backup.repository import find_restic
from raytide.control.backup.run import back_up
from raytide.control.backup.upkeep import create_repositories
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import run_dir_of
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import JobKind, JobSpec
from raytide.core.state import Store

NAME = "bench"
FILES = 8
"""The files of a checkpoint."""


def write_checkpoint(out: Path, step: int, size: int, seed: int) -> Path:
    """Writes a checkpoint of random bytes. Random bytes, like real weights, cannot be compressed and do not repeat."""
    store, name = LocalStore(out / "checkpoints"), manifest.folder_name(step, "0123abcd")
    chance, files = random.Random(seed + step), {}
    for number in range(FILES):
        digest = hashlib.sha256()
        with store.write(f"{name}/__{number}_0.distcp") as stream:
            for _ in range(max(1, size // FILES >> 20)):
                chunk = chance.randbytes(1 << 20)
                stream.write(chunk)
                digest.update(chunk)
        path = out / "checkpoints" / name / f"__{number}_0.distcp"
        files[path.name] = FileRecord(sha256=digest.hexdigest(), size=path.stat().st_size)
    manifest.commit(store, name, Manifest(step=step, samples=step, digests={}, world=FILES, files=files))
    return out / "checkpoints" / name


def make_cluster(folder: Path, runs: int, size: int, seed: int) -> Store:
    """Makes a cluster: a run folder, its records, and several training runs with one checkpoint each."""
    os.environ["RAYTIDE_HOME"] = str(folder / "home")
    run_dir = run_dir_of(NAME)
    run_dir.mkdir(parents=True)
    (folder / "password").write_text("a long password\n")
    config = yaml.safe_load(local.DEFAULT_CONFIG.read_text()) | {"cluster_name": NAME}
    where = {"repository": str(folder / "ours"), "password_file": str(folder / "password")}
    config["metadata"]["raytide"]["backup"] = where
    (run_dir / "cluster.yaml").write_text(yaml.safe_dump(config))
    store = Store.open(f"sqlite:///{run_dir / 'state.db'}")
    for number in range(runs):
        out = folder / "data" / f"run-{number}"
        write_checkpoint(out, 10, size // runs, seed + number * 1000)
        gang = GangSpec(shapes=(Shape(resources={"CPU": 1.0}),))
        spec = JobSpec(kind=JobKind.TRAIN, name="train", gang=gang, config={"out": str(out), "steps": 100})
        store.submit_job(spec, "bench", time.time())
    return store


def restic(folder: Path, *command: str) -> None:
    options = ["--repo", str(folder / "alone"), "--password-file", str(folder / "password")]
    options += ["--cache-dir", str(folder / "alone-cache")]
    subprocess.run([find_restic(), *options, *command], check=True, capture_output=True)


def timed(name: str, what: Callable[[], object]) -> dict[str, float]:
    """Returns the elapsed seconds of a call, and the CPU seconds of this process and its child processes during the
    call.
    """
    began_s, began_cpu_s = time.perf_counter(), cpu_s()
    what()
    return {name: time.perf_counter() - began_s, f"{name}, CPU": cpu_s() - began_cpu_s}


def cpu_s() -> float:
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measure(folder: Path, number: int, added: int) -> dict[str, float]:
    """Returns the seconds that raytide and restic take for the first backup, and for a second backup after one more
    checkpoint was written.
    """
    place, out = place_of(NAME), folder / "data" / "run-0"
    paths = [str(place.run_dir), str(folder / "data")]
    for left in (folder / "ours", folder / "alone", folder / "alone-cache", place.hot.cache_dir):
        shutil.rmtree(left, ignore_errors=True)
    for old in sorted((out / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(old)
    create_repositories(place)
    shutil.copytree(folder / "ours", folder / "alone")
    sides: dict[str, Callable[[], object]] = {
        "raytide": lambda: back_up(place),
        "restic": lambda: restic(folder, "backup", "--quiet", "--ignore-ctime", *paths),
    }
    order = list(sides) if number % 2 else list(reversed(sides))
    found: dict[str, float] = {}
    for side in order:
        found |= timed(f"first, {side}", sides[side])
    write_checkpoint(out, 20, added, number)
    before = stored(folder / "ours")
    for side in order:
        found |= timed(f"second, {side}", sides[side])
    found["second, new bytes in GB"] = (stored(folder / "ours") - before) / 1e9
    return found


def stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="The size of the checkpoints.")
    parser.add_argument("--added", type=float, default=0.25, help="The gigabytes of the further checkpoint.")
    parser.add_argument("--runs", type=int, default=8, help="The trainings, with a checkpoint each.")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="raytide-backup-") as name:
        folder = Path(name)
        make_cluster(folder, given.runs, int(given.gigabytes * 1e9), given.seed).close()
        results = [measure(folder, number, int(given.added * 1e9)) for number in range(given.repetitions)]
    print(f"{given.gigabytes:g} GB in {given.runs} runs, then {given.added:g} GB; {given.repetitions} repetitions,")
    print(f"seed {given.seed}; seconds: median (least to most)")
    for key in sorted(results[0]):
        values = [each[key] for each in results]
        print(f"  {key:26} {statistics.median(values):8.2f} ({min(values):.2f} to {max(values):.2f})")
    for which in ("first", "second"):
        for kind in ("", ", CPU"):
            ratios = [each[f"{which}, raytide{kind}"] / each[f"{which}, restic{kind}"] for each in results]
            spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            print(f"{which}{kind}: raytide / restic = {spread}")


if __name__ == "__main__":
    main()
