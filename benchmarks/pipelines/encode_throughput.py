"""Compares the CPU seconds and memory of tokenizing a corpus: raytide, datasets and datatrove.

There are two corpora of JSON Lines: source files of the installed packages, and synthetic text of `--synthetic-mb`.
Each system runs in a process of its own, pinned to one CPU, on the same files and with the same tokenizer. In each
round, the systems run one after the other. The figures are CPU seconds of the whole process, imports included, so
that other work on the machine matters little. A first round on 1 MB is not counted: it compiles every system's
modules and brings them into the page cache. datasets and datatrove use their fast paths: batches of 1,000 documents,
and the `tokenizers` library without a wrapper.

Raytide also builds the source files with its slower engine. With `--ray`, it also builds both corpora on a Ray
cluster with one CPU. For these builds, the figures are the CPU seconds of all of Ray's processes, the CPU seconds of
the start of the pool, and the wall time, which is only meaningful on a quiet machine. All of raytide's builds must
give the same SHA-256 of every shard. Raytide also builds a quarter and a half of the synthetic corpus, to show that
its memory does not grow with the corpus.

datasets and datatrove are installed in another environment:

    python -m venv DIR && DIR/bin/pip install datasets datatrove tokenizers transformers orjson
    python benchmarks/pipelines/encode_throughput.py --python DIR/bin/python --ray
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

FILE_BYTES = 32 << 20
SEED = 0
RAYTIDE_NAME = "raytide"

RAYTIDE = """
import sys
from raytide.core.specs.data import DataSpec, TextFilter, TokenizerSpec
from raytide.pipelines.build import build
from raytide.pipelines.runners.inline import InlineRunner
corpus, tokenizer, out = sys.argv[1:]
spec = DataSpec(inputs=(corpus,), out=out, tokenizer=TokenizerSpec(file=tokenizer), filter=TextFilter(dedup=False))
manifest = build(spec, runner=InlineRunner())
print(manifest.source.engine, *(shard.sha256 for shard in manifest.shards))
"""
BY_TOKENIZERS = """
from raytide.pipelines import build
from raytide.pipelines.tokenizer.engine import EngineSpec, engine_versions
build.choose_engine = lambda tokenizer: EngineSpec("tokenizers", tokenizer, engine_versions())
"""
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
where = dict(output_folder=out + "/tokens", tokenizer_name_or_path=tokenizer)
tokens = DocumentTokenizer(**where, eos_token="<|endoftext|>", batch_size=1000)
LocalPipelineExecutor([JsonlReader(corpus), tokens], tasks=1, workers=1, logging_dir=out + "/logs").run()
"""


def write_corpus(folder: Path, texts: Iterator[str], most_bytes: int) -> int:
    """Writes documents as JSON Lines until they have `most_bytes` of text. Returns the number of bytes of text."""
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
    """Yields documents of random words with Zipf's frequencies, so that merges and caches behave as on real text."""
    chosen = random.Random(SEED)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(chosen.choices(letters, k=1 + chosen.randrange(9))) for _ in range(50_000)]
    weights = list(accumulate(1 / (i + 1) for i in range(len(words))))
    while True:
        pool = chosen.choices(words, cum_weights=weights, k=20_000)
        for start in range(0, len(pool), 400):
            yield " ".join(pool[start : start + 400]) + ".\n"


@dataclass(frozen=True)
class Run:
    """The cost of one process."""

    cpu_s: float
    resident_mb: float
    printed: str
    """Its last line."""


@dataclass(frozen=True)
class RayRun:
    """The cost of a dataset build on a Ray cluster with one CPU. The start of Ray is not included."""

    pool_cpu_s: float
    """The CPU seconds of the worker's start, with all that it imports."""
    cpu_s: float
    """The CPU seconds of the build in the driver, the workers and Ray's daemons."""
    driver_cpu_s: float
    build_s: float
    printed: str
    """The engine and the hashes of the shards."""


def build_on_ray(corpus: str, tokenizer: str, out: str) -> RayRun:
    import psutil
    import ray

    from raytide.core.specs.data import DataSpec, TextFilter, TokenizerSpec
    from raytide.pipelines.build import build
    from raytide.pipelines.runners.gang import GangRunner

    spec = DataSpec(inputs=(corpus,), out=out, tokenizer=TokenizerSpec(file=tokenizer), filter=TextFilter(dedup=False))
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, namespace="raytide")
    group = ray.util.placement_group([{"CPU": 1}])
    ray.get(group.ready(), timeout=60)
    runner = GangRunner(lambda: {"0": group}, 1.0, 1, 1)
    me = psutil.Process()

    def spent() -> tuple[float, float, float]:
        """Returns the CPU seconds of this process, those of Ray's workers and daemons below it, and the time."""
        times = [each.cpu_times() for each in me.children(recursive=True)]
        return time.process_time(), sum(each.user + each.system for each in times), time.perf_counter()

    try:
        marks = [spent()]
        runner.run(__import__, "raytide.pipelines.build")
        marks.append(spent())
        manifest = build(spec, runner=runner)
        marks.append(spent())
    finally:
        runner.close()
        ray.shutdown()
    pool, work = (
        [after - before for after, before in zip(*pair, strict=True)]
        for pair in ((marks[1], marks[0]), (marks[2], marks[1]))
    )
    printed = " ".join([manifest.source.engine, *(shard.sha256 for shard in manifest.shards)])
    return RayRun(pool[0] + pool[1], work[0] + work[1], work[0], work[2], printed)


WRAPPER = """
import os, resource, subprocess, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, text=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
sys.stdout.write(f"{done.stdout}\\n{used.ru_utime + used.ru_stime} {used.ru_maxrss}")
sys.exit(done.returncode)
"""


def measured(command: list[str], bytecode: Path) -> Run:
    """Runs a command in a process on one CPU. Python modules are compiled only once, and their bytecode is kept in
    `bytecode`. pip likewise compiles modules once, at installation.
    """
    env = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "RAYON_NUM_THREADS": "1"}
    env |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(bytecode)}
    done = subprocess.run(
        [sys.executable, "-c", WRAPPER, *command], env=env, capture_output=True, text=True, timeout=4 * 3600
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:2])}... failed:\n{done.stderr[-3000:]}")
    *_, printed, used = ["", *filter(None, done.stdout.splitlines())]
    cpu_s, most_kb = used.split()
    return Run(float(cpu_s), int(most_kb) / 1e3, printed)


class Comparison:
    """Runs every system on a corpus, in rounds, and prints the CPU time and the memory that each system used."""

    def __init__(self, args: argparse.Namespace, folder: Path, tokenizer: Path) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self.systems = {RAYTIDE_NAME: [sys.executable, "-c", RAYTIDE]}
        if args.python:
            self.systems |= {"datasets.map": [args.python, "-c", DATASETS], "datatrove": [args.python, "-c", DATATROVE]}
        self.ray = {"raytide on Ray": [sys.executable, __file__, "--on-ray"]} if args.ray else {}
        self.slow = {"raytide, tokenizers": [sys.executable, "-c", BY_TOKENIZERS + RAYTIDE]}

    def run(self, name: str, corpus: Path) -> Run:
        with tempfile.TemporaryDirectory(dir=self.folder) as out:
            command = (self.systems | self.ray | self.slow)[name]
            return measured([*command, str(corpus), str(self.tokenizer), f"{out}/out"], self.folder / "bytecode")

    def warm_up(self, corpus: Path) -> None:
        for name in self.systems | self.ray:
            self.run(name, corpus)

    def compare(self, corpus: Path, size: int, rounds: int, *, both_engines: bool) -> None:
        names = [*self.systems, *(self.slow if both_engines else ())]
        runs: dict[str, list[Run]] = {name: [] for name in names}
        hashes = set()
        for number in range(rounds):
            for name in names:  # one after the other in each round, so that all see the same machine
                runs[name].append(run := self.run(name, corpus))
                if name.startswith("raytide"):
                    hashes.add(run.printed.partition(" ")[2])
                print(f"  round {number}: {name:<20} {run.cpu_s:7.2f} CPU s", flush=True)
        fast_s = statistics.median(run.cpu_s for run in runs[RAYTIDE_NAME])
        for name, found in runs.items():
            costs_s = [run.cpu_s for run in found]
            median_s = statistics.median(costs_s)
            print(
                f"  {name:<20} {size / 1e6 / median_s:7.2f} MB for each s of CPU ({size / 1e6 / max(costs_s):.2f} to "
                f"{size / 1e6 / min(costs_s):.2f}, {len(found)} rounds), raytide x {median_s / fast_s:.1f}; "
                f"{max(run.resident_mb for run in found):.0f} MB resident"
            )
        for name in self.ray:
            cost = RayRun(**json.loads(self.run(name, corpus).printed))
            hashes.add(cost.printed.partition(" ")[2])
            print(
                f"  {name:<20} {cost.cpu_s:.2f} CPU s, x {cost.cpu_s / fast_s:.2f} of in process, of which the driver "
                f"{cost.driver_cpu_s:.2f}; {cost.build_s:.2f} s; the pool starts in {cost.pool_cpu_s:.2f} CPU s"
            )
        if len(hashes) > 1:
            raise SystemExit("the builds gave different shards")


def part_of(corpus: Path, share: int) -> tuple[Path, int]:
    """Returns a folder with the first 1/`share` of a corpus's files, and the number of bytes in these files."""
    files = sorted(corpus.iterdir())
    part = corpus.with_name(f"{corpus.name}-{share}")
    part.mkdir()
    for file in files[: max(1, len(files) // share)]:
        os.link(file, part / file.name)
    return part, sum(file.stat().st_size for file in part.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--on-ray", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--python", help="the interpreter of an environment with datasets and datatrove")
    parser.add_argument("--packages-mb", type=int, default=64)
    parser.add_argument("--synthetic-mb", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3, help="of the source code")
    parser.add_argument("--synthetic-rounds", type=int, default=1)
    parser.add_argument("--ray", action="store_true", help="build on a Ray of one CPU too")
    args = parser.parse_args()
    if args.on_ray:
        print(json.dumps(asdict(build_on_ray(*args.on_ray))))
        return
    from raytide.core.specs.data import TrainTokenizer
    from raytide.pipelines.tokenizer.bpe import train_bpe

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        tokenizer, code, synthetic_text = folder / "tokenizer.json", folder / "packages", folder / "synthetic"
        size = write_corpus(code, package_sources(), args.packages_mb << 20)
        sample = [json.loads(line)["text"] for line in (code / "00000.jsonl").open()][::4]
        tokenizer.write_bytes(train_bpe(sample, TrainTokenizer(vocab_size=32_768)))
        comparison = Comparison(args, folder, tokenizer)
        write_corpus(folder / "first", synthetic(), 1 << 20)
        comparison.warm_up(folder / "first")
        print(f"source code of installed packages, {size / 1e6:.0f} MB; a BPE of 32,768; seed {SEED}", flush=True)
        comparison.compare(code, size, args.rounds, both_engines=True)
        size = write_corpus(synthetic_text, synthetic(), args.synthetic_mb << 20)
        print(f"synthetic, {size / 1e6:.0f} MB", flush=True)
        for share in (4, 2):
            part, part_bytes = part_of(synthetic_text, share)
            run = comparison.run(RAYTIDE_NAME, part)
            print(
                f"  raytide, {part_bytes / 1e6:.0f} MB of it: {run.cpu_s:.2f} CPU s, {run.resident_mb:.0f} MB resident"
            )
        comparison.compare(synthetic_text, size, args.synthetic_rounds, both_engines=False)


if __name__ == "__main__":
    main()
