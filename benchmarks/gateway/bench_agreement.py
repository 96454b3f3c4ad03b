"""Compares the figures of `raytide bench` and `vllm bench serve` for the same load on the same endpoint.

    python benchmarks/gateway/bench_agreement.py [--rounds 5] [--requests 64] [--concurrency 8]
                                                 [--real] [--vllm PATH]

The endpoint is one engine process and one gateway process, as `raytide up` starts them. The engine is a fake one
that yields `--rate` tokens a second for each request. With --real, it is the native engine with 28M random weights
and without a prefix cache. Both tools send the prompts of one file, with the same concurrency, and ask for answers
of the same length. They take turns, and the tool that begins changes every round.

Prints the median, minimum and maximum of each throughput and latency over the rounds. Then prints raytide's medians
divided by vLLM's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from engine_cpu import SHAPES, save_model
from overhead import HOST, ROOT, free_port, gateways, process

Figures = dict[str, float]
FIGURES = ("tokens/s", "requests/s", "first token ms", "token ms")


def vllm_figures(vllm: str, url: str, model_dir: Path, prompts: Path, args: argparse.Namespace) -> Figures:
    """Runs `vllm bench serve` and returns its figures. The command needs the metadata of the package `vllm`, which
    vLLM's package for CPUs lacks. Therefore this function writes the metadata.
    """
    folder = prompts.parent
    metadata = folder / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    command = [
        vllm, "bench", "serve", "--backend", "openai", "--model", "m", "--base-url", url.removesuffix("/v1"),
        "--endpoint", "/v1/completions", "--tokenizer", str(model_dir), "--dataset-name", "custom",
        "--dataset-path", str(prompts), "--custom-output-len", str(args.tokens), "--disable-shuffle",
        "--skip-chat-template", "--num-prompts", str(args.requests), "--max-concurrency", str(args.concurrency),
        "--num-warmups", str(args.concurrency), "--ignore-eos", "--save-result", "--result-dir", str(folder),
        "--result-filename", "vllm.json", "--disable-tqdm",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    if done.returncode:
        sys.exit(f"vllm bench serve failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    found = json.loads((folder / "vllm.json").read_text())
    keys = ("output_throughput", "request_throughput", "median_ttft_ms", "median_tpot_ms")
    return dict(zip(FIGURES, (float(found[key]) for key in keys), strict=True))


def raytide_figures(url: str, prompts: Path, args: argparse.Namespace) -> Figures:
    command = [
        sys.executable, "-m", "raytide.cli", "bench", url, "--model", "m", "--prompts", str(prompts), "-n",
        str(args.requests), "-c", str(args.concurrency), "--output-tokens", str(args.tokens), "--warmup",
        str(args.concurrency), "--json",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "platform")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    if done.returncode:
        sys.exit(f"raytide bench failed:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout)
    if found["bottleneck"]:
        print(f"raytide's generator was a bottleneck: {found['bottleneck']}")
    rates = found["output_tokens_per_s"], found["requests_per_s"]
    return dict(zip(FIGURES, (*rates, 1e3 * found["ttft_s"]["p50"], 1e3 * found["tpot_s"]["p50"]), strict=True))


def show(name: str, rounds: Sequence[Figures]) -> Figures:
    medians = {figure: statistics.median(each[figure] for each in rounds) for figure in FIGURES}
    spread = {figure: [each[figure] for each in rounds] for figure in FIGURES}
    cells = (f"{medians[f]:9.2f} ({min(spread[f]):.2f} to {max(spread[f]):.2f})" for f in FIGURES)
    print(f"{name:>18}  " + "  ".join(f"{cell:>28}" for cell in cells))
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--words", type=int, default=40, help="of each prompt")
    parser.add_argument("--rate", type=float, default=50.0, help="tokens a second of each request of the fake engine")
    parser.add_argument("--real", action="store_true", help="the native engine, with random weights")
    parser.add_argument("--vllm", default=str(Path(sys.executable).with_name("vllm")), help="the path of its command")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model_dir = folder / "model"
        model_dir.mkdir()
        save_model(model_dir, SHAPES["28M"], "float32")
        names = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1024}  # for vLLM's client
        (model_dir / "tokenizer_config.json").write_text(json.dumps(names))
        rng = random.Random(0)
        prompts = folder / "prompts.jsonl"
        words = ["tide", "ship", "moon", "sand", "wave", "wind", "rope", "star"]
        lines = [" ".join(rng.choice(words) for _ in range(args.words)) for _ in range(args.requests)]
        prompts.write_text("".join(json.dumps({"prompt": line, "output_tokens": args.tokens}) + "\n" for line in lines))
        engine: dict[str, object] = {"kind": "fake", "tokens_per_s": args.rate, "max_running": 1024}
        if args.real:
            engine = {"max_running": 64, "max_model_len": 1024, "prefix_cache": False}
        spec = json.dumps({"name": "m", "model": str(model_dir), "engine": engine})
        port = free_port()
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        stack.enter_context(process(gateways(spec, [port]), port, more_env=one_thread))
        url = f"http://{HOST}:{port}/v1"
        rounds: dict[str, list[Figures]] = {"vllm bench serve": [], "raytide bench": []}
        for turn in range(args.rounds):
            both = [
                ("vllm bench serve", lambda: vllm_figures(args.vllm, url, model_dir, prompts, args)),
                ("raytide bench", lambda: raytide_figures(url, prompts, args)),
            ]
            for name, run in both if turn % 2 else reversed(both):
                rounds[name].append(run())
        print(f"{'':>18}  " + "  ".join(f"{figure:>28}" for figure in FIGURES))
        theirs, ours = (show(name, found) for name, found in rounds.items())
        print(f"{'raytide / vllm':>18}  " + "  ".join(f"{ours[f] / theirs[f]:>28.3f}" for f in FIGURES))
        print(f"load of the machine over the last minute: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
