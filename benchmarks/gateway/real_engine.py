"""Compares three ways to serve a model: raytide's gateway in front of the native engine, the native engine in `rt.LLM`
without any server, and vLLM's own OpenAI server.

    python benchmarks/gateway/real_engine.py [--streams 1 8 32] [--rounds 5] [--threads 1]
                                             [--sides llm gateway vllm]

The model is a Llama shape of 28M random weights in bfloat16 or float32. Prompts have 16 to 256 random tokens (seed
0). Each prompt gets 64 new tokens, by greedy decoding without a prefix cache. Each engine computes with `--threads`
threads. Servers, gateways and the load generator share the machine's cores with the engine.

`--streams` streaming requests start at once. The sides take turns, and the processes of a side are stopped between
its turns, because vLLM keeps a core busy for a second after a request. tokens/s is the number of new tokens divided
by the time from the first request to the last token, as the median over the rounds. The time to the first token is
the median over all streams. It is not measured for `rt.LLM`, which returns whole batches.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from engine_cpu import SHAPES, save_model, vllm_environment
from overhead import HOST, ROOT, free_port, gateways, process

NEW_TOKENS = 64
MAX_LEN = 512
SETTLE_S = 0.2
"""For this time before and after each measurement a side does what fell due while it was stopped, or what is left."""
SHAPE = SHAPES["28M"]
LLM = """
import json, os, sys, time
from raytide import LLM, SamplingParams
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
sampling = SamplingParams(temperature=0, max_tokens=int(sys.argv[3]), ignore_eos=True)
print(flush=True)
for line in sys.stdin:
    began_s = time.perf_counter()
    outputs = llm.generate(json.loads(line), sampling)
    print(time.perf_counter() - began_s, flush=True)
"""

Prompts = list[list[int]]
Round = tuple[float, list[float]]
"""The seconds of a round, and the times to the first token."""


def local_side(
    model: Path, engine: dict[str, object], env: dict[str, str], stack: ExitStack
) -> Callable[[Prompts], Round]:
    command = [sys.executable, "-c", LLM, str(model), json.dumps(engine), str(NEW_TOKENS)]
    started = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env | {"PYTHONPATH": str(ROOT / "platform")},
        start_new_session=True,
    )
    stack.callback(started.kill)
    assert started.stdin is not None and started.stdout is not None
    written, read = started.stdin, started.stdout
    read.readline()

    def run(prompts: Prompts) -> Round:
        print(json.dumps(prompts), file=written, flush=True)
        return float(read.readline()), []

    return awake_in_turns(run, started.pid)


def awake_in_turns(run: Callable[[Prompts], Round], group: int) -> Callable[[Prompts], Round]:
    """Returns a function that calls `run` while the side's process group is running. At all other times the process
    group is stopped, so that it takes no CPU time from the other sides.
    """

    def turn(prompts: Prompts) -> Round:
        os.killpg(group, signal.SIGCONT)
        time.sleep(SETTLE_S)
        try:
            return run(prompts)
        finally:
            time.sleep(SETTLE_S)
            os.killpg(group, signal.SIGSTOP)

    os.killpg(group, signal.SIGSTOP)
    return turn


def served_side(port: int, model: str) -> Callable[[Prompts], Round]:
    return lambda prompts: asyncio.run(_round(port, model, prompts))


async def _round(port: int, model: str, prompts: Prompts) -> Round:
    began_s = time.perf_counter()
    firsts = await asyncio.gather(*(_stream(port, model, prompt) for prompt in prompts))
    return time.perf_counter() - began_s, firsts


async def _stream(port: int, model: str, prompt: list[int]) -> float:
    """Returns the time to the first token of one stream, in seconds."""
    body = {"model": model, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": True}
    data = json.dumps({**body, "ignore_eos": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\nConnection: close"
    began_s, first_s, answer = time.perf_counter(), 0.0, bytearray()
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + data)
    while piece := await reader.read(1 << 16):
        answer += piece
        if not first_s and b"data: " in answer:
            first_s = time.perf_counter() - began_s
    writer.close()
    assert f'"completion_tokens":{NEW_TOKENS}'.encode() in answer.replace(b" ", b""), bytes(answer[-600:])
    return first_s


def sides_of(args: argparse.Namespace, model: Path, stack: ExitStack) -> dict[str, Callable[[Prompts], Round]]:
    threads = {name: str(args.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    engine = {"dtype": args.dtype, "prefix_cache": False, "max_model_len": MAX_LEN, "kv_memory_gb": 1.0}
    made: dict[str, Callable[[Prompts], Round]] = {}
    if "llm" in args.sides:
        made["llm"] = local_side(model, engine, os.environ | threads, stack)
    if "gateway" in args.sides:
        spec = {"name": "m", "model": str(model), "engine": engine, "resources": {"CPU": args.threads}}
        port = free_port()
        group = stack.enter_context(process(gateways(json.dumps(spec), [port, port]), port, more_env=threads))
        made["gateway"] = awake_in_turns(served_side(port, "m"), group)
    if "vllm" in args.sides:
        cores = sorted(os.sched_getaffinity(0))[-args.threads :]
        env = vllm_environment(args.vllm_python, cores) | threads
        env.pop("VLLM_ENABLE_V1_MULTIPROCESSING")  # as its server runs by default: the engine in a process of its own
        options = ["--dtype", args.dtype, "--max-model-len", str(MAX_LEN), "--max-num-seqs", "64", "--enforce-eager"]
        port = free_port()
        command = [args.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options]
        command += ["--no-enable-prefix-caching", "--host", HOST, "--port", str(port), "--disable-uvicorn-access-log"]
        group = stack.enter_context(process(command, port, more_env=env, wait_s=300.0))
        made["vllm"] = awake_in_turns(served_side(port, str(model)), group)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--sides", choices=["llm", "gateway", "vllm"], nargs="+", default=["llm", "gateway", "vllm"])
    parser.add_argument("--vllm-python", default=sys.executable, help="an interpreter that has vLLM")
    args = parser.parse_args()
    if args.vllm_python == sys.executable and importlib.util.find_spec("vllm") is None:
        args.sides = [side for side in args.sides if side != "vllm"]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        save_model(Path(folder), SHAPE, args.dtype)
        sides = sides_of(args, Path(folder), stack)
        rng = random.Random(0)
        print(f"{'streams':>8} {'side':>8} {'tokens/s':>9} {'of rt.LLM':>10} {'first ms':>9}")
        for streams in args.streams:
            seen: dict[str, list[Round]] = {name: [] for name in sides}
            for turn in range(args.rounds + 1):
                prompts = [[rng.randrange(1, 256) for _ in range(rng.randint(16, 256))] for _ in range(streams)]
                for name, run in sides.items():
                    measured = run(prompts)
                    if turn:  # the first round warms up
                        seen[name].append(measured)
            rates = {name: statistics.median(streams * NEW_TOKENS / each[0] for each in seen[name]) for name in seen}
            for name, rounds in seen.items():
                firsts = [first_s for _, each in rounds for first_s in each]
                first = f"{statistics.median(firsts) * 1e3:9.1f}" if firsts else f"{'-':>9}"
                share = f"{rates[name] / rates['llm']:10.2f}" if "llm" in rates else f"{'-':>10}"
                print(f"{streams:>8} {name:>8} {rates[name]:>9.0f} {share} {first}", flush=True)


if __name__ == "__main__":
    main()
