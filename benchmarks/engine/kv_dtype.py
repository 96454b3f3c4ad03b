"""Measures how an int8 KV cache changes the quality for held-out text and the decoding time with long contexts.

For quality, the model with `kv_dtype="int8"` is compared with the same model without it. Both read windows of
`--window` tokens of two texts: modules of Python's library, and licences of the installed packages. `ppl` is the
relative change of the perplexity. `KL` is the divergence per token from the model without int8. `same top-1` is the
share of tokens for which both models rank the same next token first.

The speed is the mean time of a step in which `--sequences` sequences decode. Each sequence decodes 32 tokens after a
prompt of `--context` tokens. The time for the prompt is not counted. The two engines take turns, and the best round
of each counts.

    python benchmarks/engine/kv_dtype.py [--model smollm2] [--tokens 4096] [--context 1024]
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import torch

from raytide.actors.engine import LLM, SamplingParams

HELD_OUT = ("ast.py", "argparse.py", "statistics.py", "tarfile.py")
FORMS = ("auto", "int8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=4096, help="of each text")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    engines = {
        form: LLM(options.model, dtype=options.dtype, kv_dtype=form, speculation="off", prefix_cache=False)
        for form in FORMS
    }
    for name, text in texts().items():
        print(f"{name}: {quality(engines, text, options.tokens, options.window)}", flush=True)
    best = dict.fromkeys(FORMS, float("inf"))
    for _ in range(options.rounds):
        for form, llm in engines.items():
            best[form] = min(best[form], step_ms(llm, options.sequences, options.context))
    print(
        f"a step of {options.sequences} sequences at {options.context} tokens, {torch.get_num_threads()} thread(s): "
        + ", ".join(f"{form} {ms:.1f} ms" for form, ms in best.items())
    )


def texts() -> dict[str, str]:
    library, packages = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    licences = sorted(packages.glob("*.dist-info/**/LICENSE*"))[:40]
    return {
        "code": "".join((library / name).read_text() for name in HELD_OUT),
        "prose": "\n".join(each.read_text(errors="ignore") for each in licences),
    }


def quality(engines: dict[str, LLM], text: str, count: int, window: int) -> str:
    tokens = engines["auto"]._core.tokenizer.encode(text[: count * 8])[:count]
    losses: dict[str, list[torch.Tensor]] = {form: [] for form in FORMS}
    divergences, same = [], []
    for at in range(0, len(tokens), window):
        part = tokens[at : at + window]
        logs = {form: llm.logits(part)[:-1].log_softmax(-1) for form, llm in engines.items()}
        following = torch.tensor(part[1:])[:, None]
        for form, log in logs.items():
            losses[form].append(-log.gather(1, following)[:, 0])
        divergences.append((logs["auto"].exp() * (logs["auto"] - logs["int8"])).sum(-1))
        same.append((logs["auto"].argmax(-1) == logs["int8"].argmax(-1)).float())
    more = (torch.cat(losses["int8"]) - torch.cat(losses["auto"])).mean().exp().item() - 1
    kl = torch.cat(divergences)
    return (
        f"{kl.numel()} tokens, ppl {more:+.2%}, KL {kl.mean().item():.4f}, its p99 {kl.quantile(0.99).item():.3f}, "
        f"same top-1 {torch.cat(same).mean().item():.1%}"
    )


def step_ms(llm: LLM, sequences: int, context: int) -> float:
    """Returns the milliseconds of a step in which all sequences decode."""
    prompts = [[(7 * i + j) % 1000 + 1 for j in range(context)] for i in range(sequences)]
    took: list[float] = []
    for new in (1, 33):
        began = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True))
        took.append(time.perf_counter() - began)
    return (took[1] - took[0]) / 32 * 1000


if __name__ == "__main__":
    main()
