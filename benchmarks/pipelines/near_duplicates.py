"""Measures the search for near-duplicates: documents per second on one core, recall and precision.

The documents are random words. Some are copies in which words were replaced, so that the true Jaccard similarity of
their 5-grams is known. Recall is printed for each range of similarity and compared with the formula 1 - (1 -
J^8)^14. The speed is compared with datatrove's signature stage on the same documents, in the environment of
`--python` (`pip install datatrove spacy`).

    python benchmarks/pipelines/near_duplicates.py [--documents 10000] [--words 1000] [--runs 3]
                                                   [--python PYTHON]
"""

import argparse
import json
import resource
import statistics
import subprocess
import tempfile
import time

import numpy as np

from raytide.core.specs.cleaning import NearDuplicates
from raytide.pipelines.cleaning.corpus.hashing import hash_words
from raytide.pipelines.cleaning.corpus.minhash import sign
from raytide.pipelines.cleaning.corpus.near_duplicates import cluster

SIMILARITIES = (0.55, 0.65, 0.75, 0.85, 0.95)
VOCABULARY = 20_000
DATATROVE = """
import json, sys, time
from datatrove.data import Document
from datatrove.pipeline.dedup import MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
texts = json.load(open(sys.argv[1]))
stage = MinhashDedupSignature("/tmp/unused", config=MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8))
start = time.process_time()
for text in texts:
    stage.get_signature(stage.get_shingles(text))
print(json.dumps(len(texts) / (time.process_time() - start)))
"""


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    left, right = (set(zip(*(row[i:].tolist() for i in range(5)), strict=False)) for row in (a, b))
    return len(left & right) / len(left | right)


def plant(documents: int, words: int, rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Returns three things: the documents, the index of each document's original, and each copy's true similarity to
    its original. Half of the documents are copies of the others.
    """
    half = documents // 2
    rows = [rng.integers(0, VOCABULARY, rng.integers(words // 2, words * 3 // 2)) for _ in range(documents - half)]
    original, similarity = np.arange(documents), np.zeros(documents)
    for i in range(documents - half, documents):
        original[i] = i - (documents - half)
        copy = rows[original[i]].copy()
        target = SIMILARITIES[i % len(SIMILARITIES)]
        at = rng.random(len(copy)) < 1 - (2 * target / (1 + target)) ** 0.2
        copy[at] = rng.integers(VOCABULARY, 2 * VOCABULARY, at.sum())
        similarity[i] = jaccard(rows[original[i]], copy)
        rows.append(copy)
    return rows, original, similarity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--words", type=int, default=1000, help="the mean number of words of a document")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", help="a Python that has datatrove")
    args = parser.parse_args()
    rng, spec = np.random.default_rng(args.seed), NearDuplicates()
    rows, original, similarity = plant(args.documents, args.words, rng)
    vocabulary = ["".join(map(chr, rng.integers(97, 123, rng.integers(3, 9)))) + str(i) for i in range(2 * VOCABULARY)]
    texts = [" ".join(vocabulary[word] for word in row) for row in rows]
    encoded = [text.encode() for text in texts]
    ids, lengths = np.concatenate(rows).astype(np.uint64), np.array([len(row) for row in rows])
    times: dict[str, list[float]] = {"signatures of token ids": [], "words, then signatures": [], "clusters": []}
    for _ in range(args.runs):
        start_s = time.process_time()
        signatures = sign(ids, lengths, spec)
        times["signatures of token ids"].append(time.process_time() - start_s)
        start_s = time.process_time()
        words = hash_words(encoded)
        sign(words.hashes, words.lengths, spec)
        times["words, then signatures"].append(time.process_time() - start_s)
        start_s = time.process_time()
        clusters = cluster([signatures], spec.min_similarity)
        times["clusters"].append(time.process_time() - start_s)
    print(f"{len(rows):,} documents of {lengths.mean():,.0f} words, {len(b''.join(encoded)) / 1e6:.1f} MB, one core")
    for name, runs in times.items():
        speeds = [len(rows) / each for each in runs]
        print(f"{name:24} {statistics.median(speeds):9,.0f} docs/s ({min(speeds):,.0f} to {max(speeds):,.0f})")
    both = len(rows) / (statistics.median(times["signatures of token ids"]) + statistics.median(times["clusters"]))
    print(f"{'token ids to clusters':24} {both:9,.0f} docs/s")
    if args.python:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(texts[:300], file)
            file.flush()
            command = [args.python, "-c", DATATROVE, file.name]
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=3600)
            speed = float(json.loads(done.stdout.splitlines()[-1]))
            print(f"{'datatrove signatures':24} {speed:9,.0f} docs/s: {both / speed:.0f}x")
    is_dropped, is_copy = ~clusters.keep, original != np.arange(len(rows))
    for target in SIMILARITIES:
        chosen = is_copy & (np.abs(similarity - target) < 0.05)
        formula = (1 - (1 - similarity[chosen] ** spec.rows) ** spec.bands).mean()
        recall = is_dropped[chosen].mean()
        line = f"J {target - 0.05:.2f} to {target + 0.05:.2f}: {chosen.sum():5} pairs, recall {recall:.3f}"
        print(f"{line}, formula {formula:.3f}, difference {recall - formula:+.3f}")
    print(f"precision {(clusters.first[is_dropped] == original[is_dropped]).mean():.4f} of {is_dropped.sum()} dropped")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:,.0f} MB")


if __name__ == "__main__":
    main()
