"""Tokens per second of a dataset build against the tokenizers library alone, on the same text in the same run.

The yardstick is `encode_batch_fast` on one thread, times the CPUs that the build has. The build's own figures are the
encode stage (steady work) and the whole build, Ray Data's start included. Prints each run and the ratios.

    python benchmarks/pipelines/data_cpu.py [--cpus 2] [--runs 3] [--input DIR]
"""

import argparse
import os
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path

from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.specs.data import DataSpec, TokenizerSpec, TrainTokenizer
from raytide.pipelines.bpe import load_bpe
from raytide.pipelines.build import Progress, build
from raytide.pipelines.read import find_inputs, read_documents, split_parts


def library_tokens_per_s(spec: DataSpec, tokenizer: bytes) -> float:
    """One thread, text already in memory."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parts = split_parts(find_inputs(spec), spec.text_column)
    found = [document for part in read_documents(parts, spec.text_column) for document in part]
    texts = [document.decode(errors="replace") for document in found if document]
    loaded = load_bpe(tokenizer, spec.out)
    start_s = time.perf_counter()
    tokens = sum(len(encoding.ids) for encoding in loaded.encode_batch_fast(texts, add_special_tokens=False))
    return tokens / (time.perf_counter() - start_s)


def main() -> None:
    import ray

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--input", default=sysconfig.get_path("stdlib"))
    args = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(num_cpus=args.cpus, include_dashboard=False, log_to_driver=False, namespace="raytide")
    group = ray.util.placement_group([{"CPU": args.cpus}])
    ray.get(group.ready())
    stage_ratios, whole_ratios = [], []
    with tempfile.TemporaryDirectory() as folder:
        for run in range(args.runs):
            spec = DataSpec(
                inputs=(args.input,),
                include=(".py",),
                exclude=("site-packages", "dist-packages", "test", "tests"),
                tokenizer=TokenizerSpec(train=TrainTokenizer(vocab_size=4096, sample_documents=400)),
                out=f"{folder}/{run}",
                gang=GangSpec(shapes=(Shape(resources={"CPU": float(args.cpus)}),)),
            )
            seen: list[Progress] = []
            start_s = time.perf_counter()
            manifest = build(spec, group, seen.append)
            whole_s = time.perf_counter() - start_s
            bound = args.cpus * library_tokens_per_s(spec, Path(spec.out, manifest.tokenizer).read_bytes())
            stage_ratios.append(seen[-1].tokens_per_s / bound)
            whole_ratios.append(manifest.tokens / whole_s / bound)
            print(
                f"run {run}: {manifest.documents} documents, {manifest.tokens} tokens in {whole_s:.1f} s whole; "
                f"encode {seen[-1].documents_per_s:,.0f} documents/s, {seen[-1].tokens_per_s:,.0f} tokens/s; "
                f"library x {args.cpus}: {bound:,.0f} tokens/s"
            )
    for name, ratios in (("encode stage", stage_ratios), ("whole build", whole_ratios)):
        print(f"{name} / (library, 1 thread, x {args.cpus}): median {statistics.median(ratios):.2f}", end=" ")
        print(f"({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} runs, seed 0)")
    ray.shutdown()


if __name__ == "__main__":
    main()
