"""Measures text generation with and without speculation. The texts to generate were written by people. Both sides take
turns in one process.

There are three kinds of requests, and each request uses a different file of the standard library:

- edit: the prompt has a part of a file. The answer is the same part with a tenth of its lines replaced.
- completion: the prompt has the first lines of a file. The answer is the lines that follow.
- chat: the prompt is a question. The answer is a page of prose, the docstrings of a module.

The model has random weights, and the benchmark forces it to write the answer. In each step, the model computes all
logits. The benchmark then raises the logits of the answer's next tokens, both with and without drafts. The measured
times are therefore those of a model of this shape. The share of accepted drafts is the share for a model that would
write exactly this text.

With `--model`, the model in a directory writes its own answers instead, and the answers with and without speculation
are compared.

    python benchmarks/engine/speculation.py --shape 28M --dtype bfloat16 --turns 5
    python benchmarks/engine/speculation.py --model path/to/model --concurrency 1
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2] / "platform"))
sys.path.insert(0, str(Path(__file__).parent))

from engine_cpu import SHAPES, save_model

if TYPE_CHECKING:
    from raytide.actors.engine.backends.native.engine_core import EngineCore

WORKLOADS = ("edit", "completion", "chat")
MAX_LEN = 1024
FORCED = 1e4


@dataclass(frozen=True)
class Task:
    """A prompt and its answer. The engine is forced to write this answer. With the option `--model`, the engine writes
    the model's own answer instead.
    """

    prompt: str
    answer: str


def library() -> list[Path]:
    """Returns the Python files of the standard library, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [*root.glob("*.py"), *root.glob("[a-z]*/*.py")]
    return sorted(
        each for each in files if "test" not in str(each.relative_to(root)) and "site-packages" not in str(each)
    )


def tasks(workload: str, rng: random.Random) -> Iterator[Task]:
    """Yields the tasks of a workload, each from a different file."""
    files = library()
    rng.shuffle(files)
    spare = [line for file in files[:40] for line in file.read_text("utf-8", "ignore").splitlines(True) if line.strip()]
    for file in files:
        text = file.read_text("utf-8", "ignore")
        lines = text.splitlines(True)
        if workload == "chat":
            if len(prose := documentation(text)) > 1500:
                yield Task(f"What does the module {file.stem} do?\n", prose)
        elif workload == "completion" and len(lines) > 100:
            yield Task("".join(lines[:30]), "".join(lines[30:100]))
        elif workload == "edit" and len(lines) > 60:
            first = rng.randrange(len(lines) - 50)
            before = lines[first : first + 50]
            after = [line if rng.random() > 0.1 else rng.choice(spare) for line in before]
            yield Task(f"Edit this file:\n{''.join(before)}\nThe edited file:\n", "".join(after))


def documentation(text: str) -> str:
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return "\n\n".join(filter(None, (ast.get_docstring(node) for node in nodes if isinstance(node, kinds))))


def save_tokenizer(model_dir: Path, vocab: int) -> None:
    """Trains the model's tokenizer on every fourth file of the library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=min(vocab, 4096), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(file) for file in library()[::4]], trainer)
    tokenizer.save(str(model_dir / "tokenizer.json"))


@dataclass(frozen=True)
class Written:
    """The answers by request, with the time and the number of engine steps that the engine needed. `seconds` maps each
    clock ("wall" or "cpu") to a time. `seconds` and `steps` are counted from the moment at which every request has a
    token.
    """

    seconds: dict[str, float]
    answers: dict[str, list[int]]
    steps: int


class Side:
    """An engine, and the texts that it is forced to write."""

    def __init__(self, model_dir: Path, dtype: str, *, speculation: str, forced: bool) -> None:
        from raytide.actors.engine import EngineConfig
        from raytide.actors.engine.backends.native.engine_core import EngineCore

        fields = {"model_dir": str(model_dir), "dtype": dtype, "speculation": speculation, "prefix_cache": False}
        limits = {"max_model_len": MAX_LEN} if forced else {}
        config = EngineConfig.parse({**fields, **limits, "kv_memory_gb": 4.0}, where="engine")
        self.core: EngineCore = EngineCore(config)
        self._texts: dict[str, list[int]] = {}
        if forced:
            self._force(self.core)

    def _force(self, core: EngineCore) -> None:
        import torch

        logits = core.runner.logits

        def forced(chunks: Any, more_rows: Any = ()) -> Any:
            rows_RV = logits(chunks, more_rows)
            due = [chunk for chunk in chunks if chunk.yields_token]
            tokens = [
                self._texts[chunk.seq.seq_id][min(chunk.seq.output_len + at, len(self._texts[chunk.seq.seq_id]) - 1)]
                for chunk in due
                for at in range(1 + len(chunk.draft))
            ]
            with torch.inference_mode():
                rows_RV[range(len(tokens)), tokens] = FORCED
            return rows_RV

        core.runner.logits = forced  # type: ignore[method-assign]

    def generate(self, batch: list[Task], new_tokens: int) -> Written:
        """Lets the engine write the answers of a batch."""
        from raytide.actors.engine import GenRequest, SamplingParams
        from raytide.actors.engine.types import GenChunk

        core, answers = self.core, dict[str, list[int]]()
        for at, task in enumerate(batch):
            name, prompt = f"r{at}", core.tokenizer.encode(task.prompt)[-MAX_LEN + new_tokens :]
            self._texts[name] = core.tokenizer.encode(task.answer)
            count = min(new_tokens, len(self._texts[name]))
            sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            core.add(GenRequest(request_id=name, prompt=prompt, sampling=sampling), prompt)
            answers[name] = []
        steps, began, began_cpu = 0, 0.0, 0.0
        while core.has_work:
            if not began and all(answers.values()):
                began, began_cpu = time.perf_counter(), time.process_time()
            for chunk in core.step():
                assert isinstance(chunk, GenChunk), chunk
                answers[chunk.request_id] += chunk.token_ids
            steps += bool(began)
        seconds = {"wall": time.perf_counter() - began, "cpu": time.process_time() - began_cpu}
        return Written(seconds, answers, steps)


def instruction_sets() -> str:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return " ".join(
        name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if f" {name} " in flags
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["28M"])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], nargs="+", default=["bfloat16"])
    parser.add_argument("--model", type=Path, help="a model directory that writes its own answers")
    parser.add_argument("--workload", choices=WORKLOADS, nargs="+", default=list(WORKLOADS))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--speculation", choices=["ngram", "auto"], default="auto")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: where other work disturbs")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    print(f"{torch.get_num_threads()} threads, {instruction_sets()}, {options.clock} time of decoding, least to most")
    print(
        f"{'model':8}{'dtype':10}{'workload':12}{'conc.':>6}{'on / off':>10}{'spread':>14}{'tokens/step':>13}  drafts"
    )
    shapes = [options.model.name] if options.model else options.shape
    for shape, dtype in product(shapes, options.dtype):
        with tempfile.TemporaryDirectory() as folder:
            model_dir = options.model or Path(folder)
            if not options.model:
                save_model(model_dir, SHAPES[shape], dtype)
                save_tokenizer(model_dir, SHAPES[shape].vocab)
            for workload, concurrency in product(options.workload, options.concurrency):
                row = measure(model_dir, dtype, workload, concurrency, options)
                print(f"{shape[:7]:8}{dtype:10}{workload:12}{concurrency:6}{row}", flush=True)


def measure(model_dir: Path, dtype: str, workload: str, concurrency: int, options: argparse.Namespace) -> str:
    """Returns the cells of a table row. Both sides answer the same tasks, one side after the other. The two sides take
    turns at going first.
    """
    sides = {
        name: Side(model_dir, dtype, speculation=name, forced=options.model is None)
        for name in ("off", options.speculation)
    }
    source, ratios = tasks(workload, random.Random(0)), list[float]()
    made = steps_on = same = total = 0
    for turn in range(options.turns + 1):
        batch = [task for _, task in zip(range(concurrency), source, strict=False)]
        if not batch:
            break
        found = {}
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            found[name] = sides[name].generate(batch, options.new_tokens)
        if turn == 0:  # warms up
            continue
        off, on = found["off"], found[options.speculation]
        ratios.append(off.seconds[options.clock] / on.seconds[options.clock])
        made += sum(map(len, on.answers.values())) - len(batch)
        steps_on += on.steps
        same += sum(on.answers[name] == off.answers[name] for name in on.answers)
        total += len(batch)
    counts = ", ".join(
        f"{each.source} {each.accepted_tokens}/{each.draft_tokens}"
        for each in sides[options.speculation].core.stats().speculation
        if each.drafts
    )
    spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
    differing = "" if same == total else f"  ({total - same} of {total} answers differ)"
    cells = f"{statistics.median(ratios):9.2f}x{spread:>14}{made / max(1, steps_on):13.2f}"
    return f"{cells}  {counts or 'none'}{differing}"


if __name__ == "__main__":
    main()
