"""Compares the bytes, decoding speed and quality of compressed models with those of their parent, in one run.

By default the benchmark trains the parent itself, for `--steps` steps, on the Python standard library without the
held-out files. With `--model`, the parent is any Hugging Face directory instead. Each row is a recipe of `raytide
compress`. Quality is measured on two corpora that no recipe has read: the held-out modules, and the licences of the
installed packages.

The speed is the best of three rounds, in which the model and its parent take turns. Compare only the two speeds
within one row: speeds of different rows are hardly comparable. Rows that need llm-compressor are run only if
RAYTIDE_LLM_COMPRESSOR is the path of its Python interpreter. Rows that prune are shown twice: before and after a
distillation of `--distil-steps` steps, which regains quality.

    python benchmarks/engine/compression.py [--steps 600] [--distil-steps 300] [--model DIR]
                                            [--tokens 8192]
"""

import argparse
import os
import sysconfig
import tempfile
from pathlib import Path

import torch

from raytide.actors.models.families import read_architecture
from raytide.actors.trainer.runners.local import train_local
from raytide.core.specs.data import DataSpec, TokenizerSpec, TrainTokenizer
from raytide.core.specs.model import ModelSpec
from raytide.core.specs.train import TrainSpec
from raytide.pipelines.build import build
from raytide.pipelines.compress.card import CompressionCard
from raytide.pipelines.compress.chain import compress
from raytide.pipelines.compress.recipe import CompressRecipe
from raytide.pipelines.runners.inline import InlineRunner

LIBRARY = Path(sysconfig.get_path("stdlib"))
HELD_OUT = ("ast.py", "argparse.py", "statistics.py", "tarfile.py")
CALIBRATION = ("inspect.py", "shutil.py")
SEQ_LEN = 256


def write_texts(folder: Path) -> dict[str, str]:
    """Writes the corpora and returns their paths. The training text does not contain the files for evaluation and
    calibration.
    """
    learn = folder / "learn"
    learn.mkdir()
    left_out = {*HELD_OUT, *CALIBRATION}
    for file in sorted(LIBRARY.glob("*.py")) + sorted((LIBRARY / "asyncio").glob("*.py")):
        if file.name not in left_out:
            (learn / file.name).write_text(file.read_text(errors="ignore"))
    for name, files in (("code", HELD_OUT), ("calibration", CALIBRATION)):
        (folder / f"{name}.txt").write_text("".join((LIBRARY / each).read_text() for each in files))
    licences = sorted(Path(sysconfig.get_path("purelib")).glob("*.dist-info/**/LICENSE*"))
    (folder / "prose.txt").write_text("\n".join(each.read_text(errors="ignore") for each in licences[:40]))
    return {name: str(folder / f"{name}.txt") for name in ("code", "prose", "calibration")} | {"learn": str(learn)}


def build_data(folder: Path, texts: dict[str, str], tokenizer: Path | None, eos: str) -> str:
    chosen = TokenizerSpec(file=str(tokenizer), eos=eos) if tokenizer else None
    spec = DataSpec(
        inputs=(texts["learn"],),
        tokenizer=chosen or TokenizerSpec(train=TrainTokenizer(vocab_size=4096)),
        out=str(folder / "data"),
    )
    build(spec, runner=InlineRunner())
    return spec.out


def train_parent(folder: Path, data: str, steps: int) -> str:
    fields = {
        "dataset": data,
        "out": str(folder / "parent"),
        "model": ModelSpec(dim=256, layers=6, heads=8, kv_heads=4, ffn_dim=768, max_seq_len=512).model_dump(),
        "optim": {"lr": 0.001, "warmup_steps": 50},
        "steps": steps,
        "global_batch": 16,
        "seq_len": SEQ_LEN,
        "checkpoint_every": steps,
        "export_dtype": "bf16",
    }
    train_local(TrainSpec.parse(fields, where="parent"))
    return str(folder / "parent" / "model")


def recipes(data: str, distil_steps: int) -> dict[str, list[dict[str, object]]]:
    train = {"dataset": data, "steps": distil_steps, "global_batch": 16, "seq_len": SEQ_LEN, "export_dtype": "bf16"}
    train |= {"optim": {"lr": 0.0002, "warmup_steps": 20}, "checkpoint_every": distil_steps}
    distill: dict[str, object] = {"distill": {"train": train, "teacher": {"top_k": 64}}}
    prune: dict[str, object] = {"prune": {"ffn": 0.75, "kv_groups": 0.75}}
    depth: dict[str, object] = {"prune": {"layers": 0.84}}
    found: dict[str, list[dict[str, object]]] = {
        "w8a16": [{"rtn": {"scheme": "w8a16"}}],
        "w8a16 g32": [{"rtn": {"scheme": "w8a16", "group": 32}}],
        "w8a8": [{"rtn": {"scheme": "w8a8"}}],
        "fp8": [{"rtn": {"scheme": "fp8"}}],
        "w4a16 g32": [{"rtn": {"scheme": "w4a16"}}],
        "w4a16 g32 asymmetric": [{"rtn": {"scheme": "w4a16", "symmetric": False}}],
        "width 75 %": [prune],
        "width 75 %, distilled": [prune, distill],
        "width 75 %, distilled, w8a16 g32": [prune, distill, {"rtn": {"scheme": "w8a16", "group": 32}}],
        "depth 5 of 6": [depth],
        "depth 5 of 6, distilled": [depth, distill],
        "2:4 by Wanda (no byte saved)": [{"mask": {"pattern": "2:4"}}],
    }
    if os.environ.get("RAYTIDE_LLM_COMPRESSOR"):
        found["gptq w4a16 g32"] = [{"gptq": {}}]
        found["smoothquant w8a8"] = [{"smoothquant": {"scheme": "w8a8"}}]
    return found


def row(name: str, card: CompressionCard) -> str:
    quality, speed = card.quality or {}, card.speed or {}
    corpora = quality["corpora"]
    assert isinstance(corpora, dict)
    cells = [name, f"{card.bytes / 1e6:.1f} MB", f"{card.bytes / card.parent_bytes:.0%}"]
    cells += [f"{speed[f'model_{c}']:.0f} ({speed[f'parent_{c}']:.0f})" for c in ("c1", "c8")]
    for corpus in ("code", "prose"):
        found = corpora[corpus]
        error = found["dnll_error"] or 0.0
        change = f"{found['ppl_change']:+.1%} ± {error:.1%}"
        cells.append(f"{change}, {found['kl']:.4f}, {found['kl_p99']:.3f}, {found['same_top1']:.1%}")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--distil-steps", type=int, default=300)
    parser.add_argument("--model", default="")
    parser.add_argument("--eos", default="<|endoftext|>", help="the token that ends a text of --model's tokenizer")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--only", default="", help="recipes whose name holds this text")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="raytide-compression-") as place:
        folder = Path(place)
        texts = write_texts(folder)
        tokenizer = Path(given.model) / "tokenizer.json" if given.model else None
        data = build_data(folder, texts, tokenizer, given.eos)
        model = given.model or train_parent(folder, data, given.steps)
        arch = read_architecture(Path(model))
        shape = f"{arch.num_layers} layers of {arch.hidden_size}, vocabulary {arch.vocab_size}, {arch.dtype}"
        print(
            f"{model}: {shape}; {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
            flush=True,
        )
        head = "ppl, KL, its p99, same top-1"
        print(
            f"| recipe | weights | of parent | tok/s c1 (parent) | tok/s c8 (parent) | code: {head} | prose: {head} |"
        )
        print("|---|---|---|---|---|---|---|")
        quality = {"corpora": {name: {"path": texts[name], "tokens": given.tokens} for name in ("code", "prose")}}
        for number, (name, steps) in enumerate(recipes(data, given.distil_steps).items()):
            if given.only not in name:
                continue
            fields = {"model": model, "out": str(folder / f"r{number}"), "steps": steps, "speed": True}
            fields |= {"quality": quality, "calibration": {"path": texts["calibration"], "tokens": 16384}}
            card = compress(CompressRecipe.parse(fields, where=name))
            print(row(name, card), flush=True)


if __name__ == "__main__":
    main()
