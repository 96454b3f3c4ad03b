"""Measures the pause of training when a node is killed or gets a notice, for raytide and for Ray Train.

    python benchmarks/trainer/elastic_cpu.py [--runs 3] [--members 3] [--dim 256] [--layers 4] [--seed 0]

The cluster is started as by `raytide up --local`, with real raylets and the real controller. Each run trains on this
cluster, first with raytide's gang and then with Ray Train's elastic TorchTrainer. Both train a decoder of the same
size on the same tokens, over `members` nodes of one CPU each. Both may continue with one node less. A kill is a
SIGKILL to a raylet, five steps after a checkpoint. The interruption by a notice is measured for raytide only.

For each interruption, prints the seconds from the kill or the notice to the next step, and the number of repeated
steps. For raytide, also prints the seconds from the first sign (a collective error, or the notice) to the next step,
divided into phases, from `events.jsonl`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

import raytide as rt
from raytide.autoscaler.providers.local.files import NodeFolder, node_folders
from raytide.autoscaler.providers.local.spot import give_notice
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.control.client import ApiClient
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.specs.train import ModelSpec, TrainSpec

VOCAB, SEQ_LEN, BATCH, EVERY = 512, 128, 12, 20
WAIT_S = 240.0
YARDSTICK = Path(__file__).with_name("elastic_ray_train.py")
PHASES = ("detect_s", "leave_s", "wait_s", "join_s", "build_s", "load_s", "first_step_s")
SPOT = {"ray.io/market-type": "spot"}


@dataclass(frozen=True)
class Stop:
    """One interruption."""

    from_kill_s: float
    steps_lost: int
    detected_s: float | None = None
    phases: dict[str, float] | None = None
    source: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_dataset(home / "tokens")
        with local.temporary(home / "home", fleet(home, args.members), "bench") as up:
            kills, notices, yardsticks = [], [], []
            for run in range(args.runs):
                killed, noticed = ours(up, args, home, run, chance)
                kills.append(killed)
                notices.append(noticed)
                say(f"run {run}: raytide, raylet killed", killed)
                say(f"run {run}: raytide, notice", noticed)
                yardsticks.append(theirs(up, args, home, run, chance))
                say(f"run {run}: Ray Train, raylet killed", yardsticks[-1])
    print(f"\n{args.members} members, dim {args.dim}, {args.layers} layers, seed {args.seed}, {args.runs} runs")
    table = {"raytide, kill": kills, "raytide, notice": notices, "Ray Train, kill": yardsticks}
    for name, stops in table.items():
        print(
            f"{name:16} {spread([stop.from_kill_s for stop in stops])} s; steps again {[s.steps_lost for s in stops]}"
        )
    for name in ("raytide, kill", "raytide, notice"):
        print(f"{name:16} from the first sign {spread([stop.detected_s or 0.0 for stop in table[name]])} s")
    ratios = [theirs.from_kill_s / ours.from_kill_s for ours, theirs in zip(kills, yardsticks, strict=True)]
    print(f"Ray Train / raytide, kill: {spread(ratios)}")


def ours(up: LocalCluster, args: argparse.Namespace, home: Path, run: int, chance: random.Random) -> tuple[Stop, Stop]:
    """Trains with raytide and interrupts the training twice: by a kill, and then, after a new member has joined, by a
    notice. Returns both interruptions.
    """
    spec = TrainSpec(
        name=f"elastic-{run}",
        dataset=str(home / "tokens"),
        out=str(home / f"raytide-{run}"),
        model=ModelSpec(dim=args.dim, layers=args.layers, heads=8, max_seq_len=SEQ_LEN),
        steps=1_000_000,
        global_batch=BATCH,
        micro_batch=BATCH,
        seq_len=SEQ_LEN,
        checkpoint_every=EVERY,
        gang=GangSpec(
            shapes=(Shape(members=args.members, min_members=args.members - 1, resources={"CPU": 1}, labels=SPOT),)
        ),
    )
    with rt.Client(ApiClient.from_run_dir(up.run_dir)) as tide:
        job = tide.train(spec)
        metrics, events = Path(spec.out) / "metrics.jsonl", Path(spec.out) / "events.jsonl"
        whole_gang(events, args.members)
        node = node_of(up, victim(events, chance))
        beyond_a_checkpoint(metrics)
        killed = interrupted(metrics, events, lambda: kill_raylet(node))
        whole_gang(events, args.members)
        node = node_of(up, victim(events, chance))
        beyond_a_checkpoint(metrics)
        noticed = interrupted(metrics, events, lambda: give_notice(up.run_dir, node.node_id, time.time() + 30.0))
        tide.client.stop(job.id)
        until(lambda: tide.job(job.id).view.job.is_final, "the job to stop")
    return killed, noticed


def theirs(up: LocalCluster, args: argparse.Namespace, home: Path, run: int, chance: random.Random) -> Stop:
    until(lambda: len(alive(up)) >= args.members, "the nodes")
    out = home / f"ray-train-{run}.jsonl"
    config = {
        "tokens": str(home / "tokens" / "shards" / "00000.bin"),
        "out": str(out),
        "storage": str(home / f"ray-train-{run}"),
        "steps": 1_000_000,
        "vocab": VOCAB,
        "dim": args.dim,
        "layers": args.layers,
        "heads": 8,
        "seq_len": SEQ_LEN,
        "global_batch": BATCH,
        "checkpoint_every": EVERY,
        "members": args.members,
        "at_least": args.members - 1,
        "collective_timeout_s": 20,
    }
    (home / "config.json").write_text(json.dumps(config))
    environment = json.dumps({"env_vars": {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "30"}})
    ray = [sys.executable, "-m", "ray.scripts.scripts", "job"]
    command = [*ray, "submit", "--submission-id", f"yardstick-{run}", "--runtime-env-json", environment]
    environment_of_ray = {**os.environ, **up.ray_access}
    entry = f"python {YARDSTICK} {home / 'config.json'}"
    driver = subprocess.Popen([*command, "--", *entry.split()], env=environment_of_ray, stdout=subprocess.DEVNULL)
    try:
        until(lambda: out.exists() and last(out)["world"] == args.members, "Ray Train's whole group")
        beyond_a_checkpoint(out)
        node = chance.choice(alive(up))
        return interrupted(out, None, lambda: kill_raylet(node))
    finally:
        subprocess.run(
            [*ray, "stop", f"yardstick-{run}"], env=environment_of_ray, stdout=subprocess.DEVNULL, check=False
        )
        driver.wait(60.0)


def interrupted(metrics: Path, events: Path | None, deed: Callable[[], object]) -> Stop:
    """Calls `deed`, waits until training continues, and returns the interruption.

    Steps that were done before `deed` may be reported after it. They do not count as continued training. Without
    `events`, training counts as continued once a reported step differs from the last step before `deed`: it has
    another world size or a lower step number. With `events`, training counts as continued once a recovery is
    recorded.
    """
    before = last(metrics)
    told = len(recoveries(events))
    began_s = time.time()
    deed()
    if events is None:
        until(
            lambda: (now := last(metrics))["world"] != before["world"] or now["step"] < before["step"], "the next step"
        )
        steps = lines(metrics)
        at = next(
            i
            for i in range(len(steps) - 1, 0, -1)
            if steps[i - 1]["step"] >= steps[i]["step"] or steps[i - 1]["world"] != steps[i]["world"]
        )
        return Stop(steps[at]["at_s"] - began_s, steps[at - 1]["step"] - steps[at]["step"] + 1)
    until(lambda: len(recoveries(events)) > told, "the recovery")
    event = recoveries(events)[told]
    phases = {name: event[name] for name in PHASES}
    return Stop(event["at_s"] - began_s, event["steps_lost"], event["seconds"], phases, event["source"])


def recoveries(events: Path | None) -> list[dict[str, Any]]:
    return [] if events is None else [event for event in lines(events) if event["event"] == "recovered"]


def beyond_a_checkpoint(metrics: Path) -> None:
    """Waits until the fifth step after a checkpoint, so that raytide and Ray Train have the same number of steps to
    lose.
    """
    first = last(metrics)["step"] + EVERY
    until(lambda: (step := last(metrics)["step"]) > first and step % EVERY == 5, "steps")


def whole_gang(events: Path, members: int) -> None:
    def is_whole() -> bool:
        formed = [event for event in lines(events) if event["event"] == "formed"]
        return bool(formed) and formed[-1]["world"] == members

    until(is_whole, "a whole gang")


def victim(events: Path, chance: random.Random) -> str:
    """Returns the name of a random node of the newest generation."""
    formed = [event for event in lines(events) if event["event"] == "formed"][-1]
    return str(chance.choice(formed["hosts"])).split("(")[1].split()[0]


def node_of(up: LocalCluster, node_id: str) -> NodeFolder:
    return next(folder for folder in node_folders(up.run_dir) if folder.node_id == node_id)


def alive(up: LocalCluster) -> list[NodeFolder]:
    return [folder for folder in node_folders(up.run_dir) if folder.end() is None and raylets(folder)]


def raylets(node: NodeFolder) -> list[psutil.Process]:
    process = node.process()
    try:
        below = [] if process is None else psutil.Process(process.pid).children(recursive=True)
        return [one for one in below if "raylet/raylet" in " ".join(one.cmdline())]
    except psutil.Error:
        return []


def kill_raylet(node: NodeFolder) -> None:
    for process in raylets(node):
        process.send_signal(signal.SIGKILL)


def fleet(home: Path, members: int) -> Path:
    """Writes the embedded default configuration with `members` permanent spot nodes and room for one more. Returns the
    path of the file.
    """
    body = yaml.safe_load(local.DEFAULT_CONFIG.read_text())
    body["available_node_types"]["cpu1.spot"] |= {"min_workers": members, "max_workers": members + 1}
    path = home / "cluster.yaml"
    path.write_text(yaml.safe_dump(body))
    return path


def write_dataset(path: Path, tokens: int = 400_000) -> None:
    stream = np.cumsum(np.random.default_rng(0).choice([1, 2, 5], size=tokens, p=[0.7, 0.2, 0.1])) % VOCAB
    body = stream.astype("<u2").tobytes()
    (path / "shards").mkdir(parents=True)
    (path / "shards/00000.bin").write_bytes(body)
    shard = {"file": "shards/00000.bin", "tokens": tokens, "sha256": hashlib.sha256(body).hexdigest()}
    manifest = {
        "version": 1,
        "tokenizer": "tokenizer.json",
        "vocab_size": VOCAB,
        "eos_id": 0,
        "dtype": "uint16",
        "documents": 1,
        "tokens": tokens,
        "shards": [shard],
    }
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text("{}")
    (path / "manifest.json").write_text(json.dumps(manifest))


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def last(path: Path) -> dict[str, Any]:
    """Returns the newest line of a file of JSON lines. Reads only the end of the file, because the cores are busy."""
    if not path.exists():
        return {"step": 0, "world": 0}
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        whole = file.read().rpartition(b"\n")[0]
    newest = whole.rpartition(b"\n")[2]
    return dict(json.loads(newest)) if newest else {"step": 0, "world": 0}


def until(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {WAIT_S:g} s for {what}")
        time.sleep(0.05)


def say(what: str, stop: Stop) -> None:
    print(f"{what}: {stop.from_kill_s:.2f} s to the next step, {stop.steps_lost} steps again", end="")
    if stop.phases is not None:
        laps = ", ".join(f"{name.removesuffix('_s')} {seconds:.2f}" for name, seconds in stop.phases.items())
        print(f"; {stop.detected_s:.2f} s from the first sign: {laps}; from {stop.source or 'nothing'}", end="")
    print(flush=True)


def spread(values: Sequence[float]) -> str:
    return f"median {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
