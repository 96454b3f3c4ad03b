"""Measures the CPU time that an idle cluster uses, for each of its processes, raytide's and Ray's.

    python benchmarks/autoscaler/idle_cluster.py [--nodes 0] [--warm-s 30] [--seconds 60]

Starts an embedded cluster of its own with `--nodes` permanent CPU nodes, and ends it afterwards. The results are in
percent of one core. They are slightly larger if the machine is busy with other work.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import yaml

OWN = re.compile(r"-m raytide\.(\S+)")
RAYS = ("gcs_server", "raylet/raylet", "dashboard/dashboard.py", "ray::", "ray-dashboard", "ray.util.client", "ray")


def name_of(process: psutil.Process) -> str:
    command = " ".join(process.cmdline() or [process.name()])
    if found := OWN.search(command):
        return f"raytide.{found[1]}"
    return "Ray's " + next((part for part in RAYS if part in command), "others")


def cpu_times(cluster_id: str) -> dict[int, tuple[str, float]]:
    from raytide.control.bootstrap.cluster_record import MARK

    found = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == cluster_id:
                times = process.cpu_times()
                found[process.pid] = (name_of(process), times.user + times.system)
        except psutil.Error:  # it ended, or belongs to another user
            continue
    return found


def config(folder: Path, nodes: int) -> Path:
    """Writes the embedded default configuration with `nodes` permanent nodes, and returns the file's path."""
    from raytide.control.bootstrap.local import DEFAULT_CONFIG

    file = yaml.safe_load(DEFAULT_CONFIG.read_text())
    name = next(name for name in file["available_node_types"] if name != file["head_node_type"])
    file["available_node_types"][name]["min_workers"] = nodes
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(file))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=0)
    parser.add_argument("--warm-s", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    from raytide.control.bootstrap import local

    with tempfile.TemporaryDirectory() as folder:
        os.environ["RAYTIDE_HOME"] = folder
        cluster = local.up(config(Path(folder), args.nodes), name="idle")
        try:
            time.sleep(args.warm_s)
            before, began_s = cpu_times(cluster.cluster_id), time.monotonic()
            time.sleep(args.seconds)
            after, seconds = cpu_times(cluster.cluster_id), time.monotonic() - began_s
        finally:
            local.down("idle")
    used: Counter[str] = Counter()
    for pid, (name, cpu_s) in after.items():
        used[name] += 100 * (cpu_s - before.get(pid, ("", cpu_s))[1]) / seconds  # type: ignore[assignment]
    for name, percent in used.most_common():
        print(f"{percent:6.2f} %  {name}")
    own = sum(percent for name, percent in used.items() if name.startswith("raytide"))
    print(f"{sum(used.values()):6.2f} % of one core in all, {own:.2f} % of it raytide's; {args.nodes} nodes")
    print(f"load of the machine over the last minute: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
