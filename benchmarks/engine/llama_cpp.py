"""Compares the native engine with llama.cpp on the same GGUF files, prompts, numbers of new tokens and cores.

    python benchmarks/engine/llama_cpp.py                  # random, 28M weights, three formats
    python benchmarks/engine/llama_cpp.py --model smollm2  # or a path of a GGUF file

llama.cpp is the prebuilt `node-llama-cpp`, which npm installs into `--folder` at the first run (node 20 or later).

All matrices of the random model are in one format, with an exception for Q4_K: a matrix is in Q8_0 if the number of
its inputs is not divisible by Q4_K's block size. The blocks of Q4_K are random bytes, because the `gguf` package
cannot write this format. The model is therefore only for measuring speed.

Both sides get whole batches and decode greedily. JavaScript dispatches llama.cpp's batches, and Python those of the
native engine. The sides take turns, and the best turn of each counts. The spread is the difference between the best
and the worst turn, as a share of the best.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

FORMS = ("Q8_0", "Q4_0", "Q4_K")
SHAPE = {"hidden": 512, "ffn": 1536, "layers": 8, "heads": 8, "kv_heads": 4, "vocab": 4096}
SEED = 0
PACKAGES = ("node-llama-cpp@3", "@node-llama-cpp/linux-x64@3")
ANSWER_S, INSTALL_S = 600.0, 600.0

Prompts = list[list[int]]


class Side:
    """One engine in a process of its own. It answers each line of JSON on stdin with a line of JSON on stdout."""

    def __init__(self, command: list[str], cores: list[int]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(len(cores))},
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        self.instructions = self._line()["instructions"]

    def measure(self, prompts: Prompts) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(prompts) + "\n")
        self._process.stdin.flush()
        return self._line()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"{self._process.args} ended with code {self._process.wait(30)}; see its messages above.")


def native(model: str, new_tokens: int) -> None:
    """Runs the native engine: reads prompts from stdin and writes results to stdout, in the format of llama_cpp.mjs."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "platform"))
    import torch

    from raytide.actors.engine import EngineConfig, GenRequest, SamplingParams
    from raytide.actors.engine.backends.native.engine_core import EngineCore
    from raytide.kernels import compiled

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    fields = {"model_dir": model, "dtype": "bfloat16", "prefix_cache": False, "max_model_len": 1024}
    core = EngineCore(EngineConfig.parse({**fields, "quantized_input": "int8", "kv_memory_gb": 4.0}, where="engine"))
    sets = compiled.loaded_library().instructions().decode() if compiled.can_run() else "torch's operators"
    print(json.dumps({"instructions": f"{sets}; {core.info.quantization}"}), flush=True)
    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    gc.collect()
    gc.freeze()  # as an engine's own process does
    for line in sys.stdin:
        began, firsts = time.perf_counter(), dict[str, float]()
        for index, prompt in enumerate(json.loads(line)):
            core.add(GenRequest(request_id=str(index), prompt=prompt, sampling=sampling), prompt)
        while core.has_work:
            for output in core.step():
                firsts.setdefault(output.request_id, time.perf_counter() - began)
        answer = {"seconds": time.perf_counter() - began, "first_s": max(firsts.values())}
        print(json.dumps(answer), flush=True)


def save_model(path: Path, form: str) -> None:
    """Writes a Llama of random weights with a small byte-level BPE."""
    import gguf
    from gguf import quants
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE["vocab"], special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([argparse.__file__, tempfile.__file__, subprocess.__file__], trainer)
    vocab, hidden, ffn = tokenizer.get_vocab_size(), SHAPE["hidden"], SHAPE["ffn"]
    head, rng = hidden // SHAPE["heads"], np.random.default_rng(SEED)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(SHAPE["layers"])
    writer.add_context_length(1024)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(SHAPE["heads"])
    writer.add_head_count_kv(SHAPE["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(head)
    writer.add_vocab_size(vocab)
    tokens = [tokenizer.id_to_token(index) for index in range(vocab)]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == "<eos>" else 1 for token in tokens])
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_eos_token_id(0)

    def add(name: str, rows: int, columns: int) -> None:
        kind = form if form != "Q4_K" or columns % 256 == 0 else "Q8_0"
        if kind == "Q4_K":
            blocks = rng.integers(0, 256, (rows, columns // 256, 144), dtype=np.uint8)
            blocks[..., 0:2] = np.array([1e-4], np.float16).view(np.uint8)
            blocks[..., 2:4] = np.array([7.5e-4], np.float16).view(np.uint8)
            stored = blocks.reshape(rows, -1)
        else:
            values = rng.standard_normal((rows, columns), np.float32) * 0.02
            stored = quants.quantize(values, gguf.GGMLQuantizationType[kind])
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=gguf.GGMLQuantizationType[kind])

    add("token_embd", vocab, hidden)
    add("output", vocab, hidden)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for index in range(SHAPE["layers"]):
        at, kv = f"blk.{index}", head * SHAPE["kv_heads"]
        for name, rows in (("attn_q", hidden), ("attn_k", kv), ("attn_v", kv), ("attn_output", hidden)):
            add(f"{at}.{name}", rows, hidden)
        add(f"{at}.ffn_gate", ffn, hidden)
        add(f"{at}.ffn_up", ffn, hidden)
        add(f"{at}.ffn_down", hidden, ffn)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{at}.{name}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def install(folder: Path) -> None:
    if (folder / "node_modules" / "@node-llama-cpp" / "linux-x64").is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text("{}")
    command = ["npm", "install", "--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund", *PACKAGES]
    subprocess.run(command, cwd=folder, check=True, timeout=INSTALL_S, stdout=sys.stderr)


def compare(name: str, path: str, options: argparse.Namespace, cores: list[int]) -> None:
    prompts_of = np.random.default_rng(SEED)
    here, count = Path(__file__).parent, str(options.new_tokens)
    sides = {
        "native": Side([sys.executable, __file__, "--native", path, "--new-tokens", count], cores),
        "llama.cpp": Side(
            ["node", str(here / "llama_cpp.mjs"), str(options.folder), path, str(len(cores)), count], cores
        ),
    }
    for side, found in sides.items():
        print(f"{name}, {side}: {' '.join(found.instructions.split())}")
    for concurrency in options.concurrency:
        prompts = prompts_of.integers(1, 300, (concurrency, options.prompt_tokens)).tolist()
        rates: dict[str, list[float]] = {side: [] for side in sides}
        firsts: dict[str, float] = {}
        for turn in range(options.repeats + 1):
            for side, found in sides.items():
                answer = found.measure(prompts)
                if turn:  # the first warms up
                    rates[side].append(concurrency * options.new_tokens / answer["seconds"])
                    firsts[side] = min(firsts.get(side, answer["first_s"]), answer["first_s"])
        cells = [
            f"{side} {max(rates[side]):.0f} tok/s (spread {1 - min(rates[side]) / max(rates[side]):.0%}, last first "
            f"token {firsts[side] * 1e3:.0f} ms)"
            for side in sides
        ]
        ratio = max(rates["native"]) / max(rates["llama.cpp"])
        print(f"{name}, c={concurrency}: {'; '.join(cells)}; native / llama.cpp {ratio:.2f}", flush=True)
    for found in sides.values():
        found.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", help="a GGUF file, or the name of a packaged model; default: random ones")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "raytide" / "node-llama-cpp")
    parser.add_argument("--native", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.native:
        native(options.native, options.new_tokens)
        return
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    install(options.folder)
    print(
        f"{len(cores)} core(s), {options.prompt_tokens} prompt tokens, {options.new_tokens} new ones, seed {SEED}, "
        f"best of {options.repeats}"
    )
    if options.model:
        sys.path.insert(0, str(Path(__file__).parents[2] / "platform"))
        from raytide.actors.models.quantized.gguf.packaged_models import packaged_path

        compare(options.model, str(packaged_path(options.model) or options.model), options, cores)
        return
    with tempfile.TemporaryDirectory() as folder:
        for form in options.forms:
            path = Path(folder) / f"{form}.gguf"
            save_model(path, form)
            compare(form, str(path), options, cores)


if __name__ == "__main__":
    main()
