"""Measures best-fit packing: the share of padding, the share of cut documents, and the speed.

The share of cut documents is compared with that of concat-and-chop. It counts only documents that fit into a row.
The speed is compared with that of a plain Python loop. The loop also does best-fit (with a heap for each amount of
room), but only on the first documents.

With `--dataset`, the documents are those of a token dataset. Otherwise their lengths are random, like those of code
files: log-normal, at least 2 tokens. Times are CPU seconds. The seed is printed.

    python benchmarks/trainer/packing.py [--dataset DIR] [--documents 1000000] [--runs 3] [--seed 0]
"""

import argparse
import heapq
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from raytide.actors.trainer.data.packing import best_fit
from raytide.core.io.token_dataset import document_ends, load_manifest

PLAIN_DOCUMENTS = 50_000


def plain_best_fit(lengths: list[int], seq_len: int) -> int:
    """Packs documents with a plain Python loop, and returns the number of rows."""
    pieces = sorted((length % seq_len for length in lengths if length % seq_len), reverse=True)
    rows = sum(length // seq_len for length in lengths)
    rooms: list[list[int]] = [[] for _ in range(seq_len + 1)]
    open_rooms: list[int] = []
    for time_placed, size in enumerate(pieces):
        room = next((each for each in sorted(open_rooms) if each >= size), None)
        if room is None:
            rows, room = rows + 1, seq_len
        else:
            heapq.heappop(rooms[room])
            if not rooms[room]:
                open_rooms.remove(room)
        if room > size:
            if not rooms[room - size]:
                open_rooms.append(room - size)
            heapq.heappush(rooms[room - size], time_placed)
    return rows


def chopped(ends: np.ndarray[Any, np.dtype[np.int64]], lengths: np.ndarray[Any, np.dtype[np.int64]], seq: int) -> float:
    """Returns the share of documents that are cut by the method concat-and-chop. Counts only documents that fit into a
    row.
    """
    fits = lengths <= seq
    cut = (ends - lengths) // seq != (ends - 1) // seq
    return float((cut & fits).sum() / max(1, fits.sum()))


def cpu_s(work: Callable[[], object], runs: int) -> list[float]:
    spent = []
    for _ in range(runs):
        begin_s = time.process_time()
        work()
        spent.append(time.process_time() - begin_s)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="")
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.dataset:
        ends = document_ends(args.dataset, load_manifest(args.dataset))
        lengths = np.diff(ends, prepend=0)
    else:
        drawn = np.random.default_rng(args.seed).lognormal(7.2, 1.4, args.documents)
        lengths = np.maximum(2, drawn).astype(np.int64)
        ends = np.cumsum(lengths)
    print(f"{len(lengths):,} documents, {int(ends[-1]):,} tokens, seed {args.seed}")
    for seq_len in (2048, 8192, 32768):
        plan = best_fit(ends - lengths, lengths, seq_len)
        packed = cpu_s(lambda seq_len=seq_len: best_fit(ends - lengths, lengths, seq_len), args.runs)
        some = lengths[:PLAIN_DOCUMENTS].tolist()
        plain = cpu_s(lambda some=some, seq_len=seq_len: plain_best_fit(some, seq_len), args.runs)
        rates = [len(plan.lengths) / spent / 1e6 for spent in packed]
        plain_rate = sum(length // seq_len + 1 for length in some) / statistics.median(plain) / 1e6
        pairs = float(plan.attention_pairs(np.arange(plan.rows)).sum()) / (plan.rows * seq_len**2)
        cut = chopped(ends, lengths, seq_len)
        print(
            f"seq_len {seq_len}: padding {plan.padding:.4%}, cut that would fit 0 (chop {cut:.1%}), "
            f"attention pairs {pairs:.0%}, {statistics.median(rates):.2f} ({min(rates):.2f} to {max(rates):.2f}) "
            f"M pieces/s, plain loop {plain_rate:.2f}"
        )


if __name__ == "__main__":
    main()
