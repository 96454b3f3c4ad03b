"""Measures the documents per second of each cleaning rule on one core, and the share of documents that the rule keeps.

The corpus is the text of a given folder, or documents of random words. For comparison, datatrove's filters with the
same rules run on the same documents. These filters run with the interpreter `--python`, which must have datatrove
and datatrove's word tokenizer.

    python benchmarks/pipelines/quality_rules.py [--input DIR] [--documents 400] [--runs 3]
                                                 [--python PYTHON]
"""

import argparse
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from raytide.core.specs.cleaning import CleaningSpec, DocumentRules
from raytide.pipelines.cleaning.cleaner import Cleaner

RULES = ("gopher", "gopher_repetition", "c4", "fineweb", "code", "language", "pii", "secrets", "strip_licence_headers")
DATATROVE = """
import json, sys, time
from datatrove.data import Document
from datatrove.pipeline.filters import C4QualityFilter, FineWebQualityFilter
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
texts = json.load(open(sys.argv[1]))
filters = {"gopher": GopherQualityFilter(), "gopher_repetition": GopherRepetitionFilter(), "c4": C4QualityFilter(),
           "fineweb": FineWebQualityFilter()}
found = {}
for name, each in filters.items():
    start = time.process_time()
    kept = sum(each.filter(Document(text=text, id="x")) is True for text in texts)
    found[name] = [len(texts) / (time.process_time() - start), kept / len(texts)]
print(json.dumps(found))
"""


def made(documents: int, seed: int) -> list[str]:
    """Returns documents of about 2 kB: sentences of made-up words and the usual small words."""
    source = random.Random(seed)
    words = ["".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=source.randint(3, 9))) for _ in range(5000)]
    small = ["the", "of", "and", "to", "that", "with", "have", "be"]

    def sentence() -> str:
        return " ".join(source.choice(small if source.random() < 0.3 else words) for _ in range(12)).capitalize() + "."

    return ["\n".join(" ".join(sentence() for _ in range(3)) for _ in range(10)) for _ in range(documents)]


def measure(function: Callable[[str], bool], texts: list[str]) -> tuple[float, float]:
    """Returns the documents per CPU second, and the share of documents that are kept."""
    start_s = time.process_time()
    kept = sum(map(function, texts))
    return len(texts) / (time.process_time() - start_s), kept / len(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", type=Path)
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", help="a Python that has datatrove")
    args = parser.parse_args()
    if args.input is None:
        texts = made(args.documents, args.seed)
    else:
        files = sorted(path for path in args.input.rglob("*") if path.is_file())
        random.Random(args.seed).shuffle(files)
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in files[: args.documents]]
    print(f"{len(texts)} documents, {sum(map(len, texts)) / len(texts):,.0f} characters each; CPU seconds, one core")
    yardstick = {}
    if args.python:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(texts, file)
            file.flush()
            command = [args.python, "-c", DATATROVE, file.name]
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=3600)
            yardstick = json.loads(done.stdout.splitlines()[-1])
    for name in RULES:
        cleaner = Cleaner(CleaningSpec(rules=DocumentRules.model_validate({name: True})))
        cleaner.clean(texts[0])  # loads the model, if there is one
        runs = [measure(lambda text, cleaner=cleaner: cleaner.clean(text).is_kept, texts) for _ in range(args.runs)]
        speeds = [speed for speed, _ in runs]
        line = f"{name:22} {statistics.median(speeds):9,.0f} docs/s ({min(speeds):,.0f} to {max(speeds):,.0f}), "
        line += f"keeps {runs[0][1]:.1%}"
        if name in yardstick:
            speed, share = yardstick[name]
            line += f"; datatrove {speed:,.0f} docs/s, keeps {share:.1%}: {statistics.median(speeds) / speed:.1f}x"
        print(line)


if __name__ == "__main__":
    main()
