"""Builds a dataset again and again, and is killed each time at a random moment but the last.

    python tests/pipelines/killed_builds.py CORPUS OUT TOKENIZER KILLS SEED

One process imports everything and forks a child for each build, so that a kill falls into the build. Prints, for each
child, how many chunks it found finished, how many were finished when it died, how it ended, and whether the dataset was
complete then.
"""

import importlib
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from raytide.core.io.token_dataset import MANIFEST
from raytide.core.specs.data import DataSpec, TextFilter, TokenizerSpec, TrainTokenizer
from raytide.pipelines import inputs
from raytide.pipelines.build import build
from raytide.pipelines.runners.inline import InlineRunner

TASK_S = 0.01
"""Each file is read this slowly, so that kills fall between chunks too."""


def spec_of(corpus: str, out: str, tokenizer: str) -> DataSpec:
    given = TokenizerSpec(file=tokenizer) if tokenizer else TokenizerSpec(train=TrainTokenizer(vocab_size=320))
    return DataSpec(
        inputs=(corpus,), out=out, tokenizer=given, shard_tokens=100, texts="jsonl", filter=TextFilter(max_chars=4000)
    )


def slowly(threads: int, spec: DataSpec) -> None:
    from raytide.pipelines import survey

    real = survey.read_parts

    def read_parts(*args: object) -> object:
        time.sleep(TASK_S)
        return real(*args)  # type: ignore[arg-type]

    survey.read_parts = read_parts  # type: ignore[assignment]
    build(spec, runner=InlineRunner(threads))


def timed(spec: DataSpec) -> float:
    """Returns the seconds of a build that is not killed."""
    start_s = time.perf_counter()
    if not (child := os.fork()):
        slowly(1, spec)
        os._exit(0)
    os.waitpid(child, 0)
    return time.perf_counter() - start_s


def finished(out: str) -> int:
    return len(list(Path(out, ".partial").glob("survey-*")))


def main() -> None:
    corpus, out, tokenizer, kills, seed = sys.argv[1:]
    chosen = random.Random(int(seed))
    inputs.MAX_CHUNK_PARTS = 1
    spec = spec_of(corpus, out, tokenizer)
    for name in ("fastokens", "fsspec.implementations.local", "pyarrow", "tokenizers"):
        importlib.import_module(name)  # the children have no time for it
    whole_s = timed(spec.model_copy(update={"out": f"{out}-timed"})) if int(kills) else 0.0
    for kill in range(int(kills) + 1):
        before, threads = finished(out), chosen.choice([1, 2, 4])
        child = os.fork()
        if not child:
            slowly(threads, spec)
            os._exit(0)
        if kill < int(kills):
            time.sleep(chosen.uniform(0.0, 0.6 * whole_s))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        is_built = Path(out, MANIFEST).exists()
        sys.stdout.write(f"{before} {finished(out)} {os.waitstatus_to_exitcode(status)} {int(is_built)}\n")
        sys.stdout.flush()
        if kill < int(kills) and Path(out, "manifest.json").exists():
            shutil.rmtree(out)  # done before its kill: the next one begins anew


if __name__ == "__main__":
    main()
