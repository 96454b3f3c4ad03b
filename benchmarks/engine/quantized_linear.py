"""Measures the time that a decoding step spends in its linear layers and its head. Compares weights of 8 bits, 4 bits,
bfloat16 and float32.

Weights are random. Their scales are rounded to float16, as in GGUF's Q8_0 and Q4_0. Every layer has weights of its
own, so that the caches are used as in a real model. "native" means the implementation that the engine chooses for
the dtype on this machine. This is oneDNN where oneDNN is faster.

A form is a weight format with the type of its inputs (`--form`). Each round measures every form once, and the best
round of each form counts. Prints the milliseconds of a step of `rows` tokens, and the ratio of bfloat16's time to
the form's time. By default, time is the CPU time of all threads divided by the number of threads. Other work on the
machine disturbs CPU time less than wall time.

    python benchmarks/engine/quantized_linear.py --shape 28M 350M --threads 1
    python benchmarks/engine/quantized_linear.py --march x86-64-v3 --rows 1 64
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from engine_cpu import SHAPES, Shape

from raytide.kernels import compiled, library
from raytide.kernels.core import LinearInput, QuantizedWeight
from raytide.kernels.registry import ops_for

Linear = Callable[[torch.Tensor], torch.Tensor]
FORMS = ("fp32", "bf16", "int8 float", "int8 int8", "int4 float", "int4 int8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 64])
    parser.add_argument("--form", choices=FORMS, nargs="+", default=list(FORMS))
    parser.add_argument("--group", type=int, default=32, help="inputs that share a scale of the weight; 0: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clock", choices=["cpu", "wall"], default="cpu")
    parser.add_argument(
        "--march", default="native", help="build the C operators for another processor, as gcc names it"
    )
    options = parser.parse_args()
    library._FLAGS = tuple(f"-march={options.march}" if "-march" in flag else flag for flag in library._FLAGS)
    torch.set_num_threads(options.threads)
    is_here = options.march == "native"
    chosen = f"bfloat16 by {ops_for('cpu').linear.__module__ if is_here else compiled.__name__}"
    print(
        f"{compiled.loaded_library().instructions().decode()}; {chosen}; {options.threads} thread(s), {options.clock}"
    )
    print(f"{'shape':6}{'rows':>5}" + "".join(f"{form:>19}" for form in options.form))
    for name in options.shape:
        models = {form: model(SHAPES[name], form, options.group, is_here) for form in options.form}
        for rows in options.rows:
            inputs = {width: torch.randn(rows, width) for width, _ in models[options.form[0]]}
            best = dict.fromkeys(options.form, float("inf"))
            for _ in range(options.rounds):
                for form, linears in models.items():
                    best[form] = min(best[form], step_ms(linears, inputs, form, options.clock) / options.threads)
            base = best.get("bf16", float("nan"))
            print(f"{name:6}{rows:5}" + "".join(f"{ms:10.2f} ({base / ms:5.2f}x)" for ms in best.values()), flush=True)


def model(shape: Shape, form: str, group: int, is_here: bool) -> list[tuple[int, Linear]]:
    """Returns the linear layers of a step in order, each as a pair (number of inputs, layer)."""
    attention, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = [
        (attention + 2 * kv, shape.hidden),
        (shape.hidden, attention),
        (2 * shape.ffn, shape.hidden),
        (shape.hidden, shape.ffn),
    ]
    weights = {size: torch.randn(size) * size[1] ** -0.5 for size in [*layer, (shape.vocab, shape.hidden)]}
    sizes = layer * shape.layers + [(shape.vocab, shape.hidden)]
    return [(size[1], linear(weights[size], form, group, is_here)) for size in sizes]


def linear(weight: torch.Tensor, form: str, group: int, is_here: bool) -> Linear:
    ops = ops_for("cpu")
    if form in ("fp32", "bf16"):
        dtype = torch.float32 if form == "fp32" else torch.bfloat16
        return (ops.linear if is_here else compiled.linear)(weight.to(dtype), None)
    kind, input_as = form.split()
    bits, most = (8, 127) if kind == "int8" else (4, 7)
    grouped = weight.unflatten(1, (-1, group or weight.shape[1]))
    scales = (grouped.abs().amax(-1, keepdim=True) / most).half().float()
    codes = (grouped / scales).round().clamp(-most - 1, most).to(torch.int8).flatten(1)
    as_int8: LinearInput = "int8" if input_as == "int8" else "float"
    return ops.quantized_linear(QuantizedWeight(bits, codes, scales[..., 0]), None, as_int8)  # type: ignore[arg-type]


def step_ms(linears: list[tuple[int, Linear]], inputs: dict[int, torch.Tensor], form: str, clock: str) -> float:
    dtype = torch.float32 if form == "fp32" else torch.bfloat16
    given = {width: x.to(dtype) for width, x in inputs.items()}
    read = time.process_time if clock == "cpu" else time.perf_counter
    began = read()
    for width, apply in linears:
        apply(given[width])
    return (read() - began) * 1000


if __name__ == "__main__":
    main()
