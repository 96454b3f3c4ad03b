"""CPU seconds and memory of tokenizing a corpus: raytide in one process, by either engine, datasets and datatrove.

Two corpora of JSON Lines: source files of the installed packages, and synthetic text of `--synthetic-mb`. Every system
runs in a process of its own, one after the other, pinned to one CPU, on the same files with the same tokenizer; the
figures are CPU seconds of that process, so that other work on the machine matters little. With `--ray` a build on a Ray
of one CPU is measured too: the CPU seconds of all of Ray's processes, apart from the start of the pool, and the wall
time, which wants a quiet machine. Builds by both engines must give the same SHA-256 of every shard. Raytide also builds
a quarter, a half and all of the synthetic corpus, to show that its memory does not grow with it.

datasets and datatrove come from another environment:

    python -m venv DIR && DIR/bin/pip install datasets datatrove tokenizers transformers orjson
    python benchmarks/pipelines/encode_throughput.py --python DIR/bin/python [--synthetic-mb 1024] [--runs 3] [--ray]
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raytide.core.io.token_dataset import TokenManifest
    from raytide.core.specs.data import DataSpec

FILE_BYTES = 32 << 20
SEED = 0

DATASETS = """
import sys
from datasets import load_dataset
from tokenizers import Tokenizer
corpus, tokenizer, out = sys.argv[1:]
loaded = Tokenizer.from_file(tokenizer)
def encode(batch):
    return {"ids": [each.ids for each in loaded.encode_batch_fast(batch["text"], add_special_tokens=False)]}
rows = load_dataset("json", data_files=corpus + "/*.jsonl", split="train", cache_dir=out)
rows = rows.map(encode, batched=True, batch_size=1000, remove_columns=["text"])
"""
DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
corpus, tokenizer, out = sys.argv[1:]
tokens = DocumentTokenizer(output_folder=out + "/tokens", tokenizer_name_or_path=tokenizer, eos_token="<|endoftext|>")
LocalPipelineExecutor([JsonlReader(corpus), tokens], tasks=1, workers=1, logging_dir=out + "/logs").run()
"""


def write_corpus(folder: Path, texts: Iterator[str], most_bytes: int) -> int:
    """Writes documents as JSON Lines until `most_bytes` of text are there; returns the bytes of text."""
    folder.mkdir(parents=True)
    size = number = in_file = 0
    file = (folder / "00000.jsonl").open("w")
    for text in texts:
        if in_file > FILE_BYTES:
            file.close()
            number, in_file = number + 1, 0
            file = (folder / f"{number:05d}.jsonl").open("w")
        file.write(json.dumps({"text": text}) + "\n")
        in_file += len(text)
        size += len(text.encode())
        if size >= most_bytes:
            break
    file.close()
    return size


def package_sources() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
        try:
            yield path.read_text()
        except (OSError, UnicodeDecodeError):
            continue


def synthetic() -> Iterator[str]:
    """Documents of words with Zipf's frequencies, so that merges and caches work as on text."""
    chosen = random.Random(SEED)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(chosen.choices(letters, k=1 + chosen.randrange(9))) for _ in range(50_000)]
    weights = list(accumulate(1 / (i + 1) for i in range(len(words))))
    while True:
        pool = chosen.choices(words, cum_weights=weights, k=20_000)
        for start in range(0, len(pool), 400):
            yield " ".join(pool[start : start + 400]) + ".\n"


def raytide_build(engine: str, corpus: str, tokenizer: str, out: str) -> None:
    """Builds in this process, and prints the hash of each shard."""
    from raytide.core.specs.data import DataSpec, TextFilter, TokenizerSpec
    from raytide.pipelines import build as building
    from raytide.pipelines.runners.inline import InlineRunner
    from raytide.pipelines.tokenizer.engine import EngineSpec, engine_versions

    if engine == "tokenizers":
        building.choose_engine = lambda tokenizer: EngineSpec("tokenizers", tokenizer, engine_versions())
    spec = DataSpec(inputs=(corpus,), out=out, tokenizer=TokenizerSpec(file=tokenizer), filter=TextFilter(dedup=False))
    if engine == "ray":
        manifest = ray_build(spec)
    else:
        manifest = building.build(spec, runner=InlineRunner())
    sys.stdout.write(" ".join([manifest.source.engine, *(shard.sha256 for shard in manifest.shards)]) + "\n")


def ray_build(spec: "DataSpec") -> "TokenManifest":
    """Builds on a Ray of one CPU, and reports the CPU seconds of all its processes, apart from the start of the pool:
    the worker's process with all that it imports."""
    import psutil
    import ray

    from raytide.pipelines import build as building
    from raytide.pipelines.runners.gang import GangRunner

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, namespace="raytide")
    group = ray.util.placement_group([{"CPU": 1}])
    ray.get(group.ready(), timeout=60)
    runner = GangRunner(lambda: {"0": group}, 1.0, 1, 1)
    me = psutil.Process()

    def spent() -> tuple[float, float]:
        """Returns the CPU seconds of this process, and those of Ray's workers and daemons below it."""
        times = [each.cpu_times() for each in me.children(recursive=True)]
        return time.process_time(), sum(each.user + each.system for each in times)

    try:
        marks = [spent()]
        start_s = time.perf_counter()
        runner.run(__import__, "raytide.pipelines.build")
        marks.append(spent())
        started_s = time.perf_counter()
        manifest = building.build(spec, runner=runner)
        marks.append(spent())
        ended_s = time.perf_counter()
    finally:
        runner.close()
        ray.shutdown()
    pool, driver, workers = (
        sum(marks[1]) - sum(marks[0]),
        *(after - before for after, before in zip(marks[2], marks[1], strict=True)),
    )
    sys.stderr.write(
        f"  on Ray: start of the pool {pool:.2f} CPU s and {started_s - start_s:.2f} s; the build "
        f"{driver + workers:.2f} CPU s, {driver:.2f} of them the driver's, and {ended_s - started_s:.2f} s\n"
    )
    return manifest


def measured(command: list[str]) -> tuple[float, float, str]:
    """Returns the CPU seconds and the most resident MB of a process, and what it printed last."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = "import os, resource, subprocess, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    code += "done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, text=True); sys.stdout.write(done.stdout); "
    code += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(done.returncode)"
    env = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "RAYON_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *command], env=env, capture_output=True, text=True, timeout=4 * 3600
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:3])}... failed:\n{done.stderr[-3000:]}")
    for line in done.stderr.splitlines():
        if line.startswith("  on Ray"):
            print(line)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    *_, printed, most_kb = ["", *done.stdout.strip().splitlines()]
    return spent_s, int(most_kb) / 1e3, printed


def compare(corpus: Path, size: int, tokenizer: Path, args: argparse.Namespace) -> None:
    systems = {f"raytide, {engine}": [sys.executable, __file__, "--build", engine] for engine in args.engines}
    if args.python:
        systems |= {"datasets.map": [args.python, "-c", DATASETS], "datatrove": [args.python, "-c", DATATROVE]}
    rates: dict[str, list[float]] = {name: [] for name in systems}
    hashes = set()
    for run in range(args.runs):
        for name, command in systems.items():  # one after the other in each run, so that all see the same machine
            with tempfile.TemporaryDirectory() as out:
                cpu_s, most_mb, printed = measured([*command, str(corpus), str(tokenizer), f"{out}/out"])
            rates[name].append(size / 1e6 / cpu_s)
            if name.startswith("raytide"):
                hashes.add(printed.partition(" ")[2])
            print(
                f"  run {run}: {name:<20} {cpu_s:7.2f} CPU s, {rates[name][-1]:7.2f} MB/s, {most_mb:6.0f} MB resident"
            )
    if len(hashes) > 1:
        raise SystemExit("the engines gave different shards")
    medians = {name: statistics.median(found) for name, found in rates.items()}
    fast = medians[next(iter(systems))]
    for name, found in rates.items():
        spread = f"{min(found):.2f} to {max(found):.2f}, {len(found)} runs"
        print(f"  {name:<20} median {medians[name]:7.2f} MB/s of CPU ({spread}): x {fast / medians[name]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", help=argparse.SUPPRESS)
    parser.add_argument("paths", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--python", help="the interpreter of an environment with datasets and datatrove")
    parser.add_argument("--packages-mb", type=int, default=64)
    parser.add_argument("--synthetic-mb", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ray", action="store_true", help="build on a Ray of one CPU too")
    args = parser.parse_args()
    if args.build:
        raytide_build(args.build, *args.paths)
        return
    from raytide.core.specs.data import TrainTokenizer
    from raytide.pipelines.tokenizer.bpe import train_bpe

    args.engines = ["fastokens", "tokenizers", *(["ray"] if args.ray else [])]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder, "tokenizer.json")
        code = Path(folder, "packages")
        size = write_corpus(code, package_sources(), args.packages_mb << 20)
        sample = [json.loads(line)["text"] for line in (code / "00000.jsonl").open()][::4]
        tokenizer.write_bytes(train_bpe(sample, TrainTokenizer(vocab_size=32_768)))
        print(f"source code of installed packages, {size / 1e6:.0f} MB; a BPE of 32,768; seed {SEED}")
        compare(code, size, tokenizer, args)
        whole = args.synthetic_mb << 20
        for share in (4, 2, 1):
            made = Path(folder, f"synthetic-{share}")
            size = write_corpus(made, synthetic(), whole // share)
            with tempfile.TemporaryDirectory() as out:
                command = [sys.executable, __file__, "--build", "fastokens", str(made), str(tokenizer), f"{out}/out"]
                cpu_s, most_mb, _ = measured(command)
            print(f"synthetic, {size / 1e6:.0f} MB: {size / 1e6 / cpu_s:.2f} MB/s of CPU, {most_mb:.0f} MB resident")
        print("synthetic, all of it, beside the others")
        compare(made, size, tokenizer, args)


if __name__ == "__main__":
    main()
