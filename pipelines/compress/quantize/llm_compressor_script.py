"""Quantises a model with llm-compressor: `python llm_compressor_script.py TASK.json`, in llm-compressor's virtual
environment.

The script imports nothing from raytide, which needs other versions of the same libraries. The task is a JSON object
with source, out, tokens (lists of ids), method, bits, group, symmetric, activations, ignore and strength.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    task = json.loads(Path(path).read_text())
    import torch

    if not torch.cuda.is_available():
        # Its cache pins memory for an accelerator, which raises where there is none.
        torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    from llmcompressor import oneshot
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(  # a directory, never a name of the hub  # nosec B615
        task["source"], dtype="auto", local_files_only=True
    )
    if (Path(task["source"]) / "generation_config.json").is_file():
        # The caller copies that file: transformers cannot save it if it has a temperature but no sampling.
        model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    samples = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in task["tokens"]]

    def collate(batch: list[dict[str, list[int]]]) -> dict[str, Any]:
        return {key: torch.tensor([each[key] for each in batch]) for key in batch[0]}

    oneshot(
        model=model,
        dataset=DataLoader(samples, batch_size=1, collate_fn=collate),  # type: ignore[arg-type]
        recipe=modifiers(task),
        num_calibration_samples=len(samples),
        max_seq_length=max(map(len, task["tokens"])),
        pipeline="sequential",
    )
    model.save_pretrained(task["out"], save_compressed=True)


def modifiers(task: dict[str, Any]) -> list[Any]:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    group = task["group"]
    weights = QuantizationArgs(
        num_bits=task["bits"],
        type="int",
        symmetric=task["symmetric"],
        strategy="channel" if group is None else "group",
        group_size=group,
        dynamic=False,
    )
    inputs = None
    if task["activations"]:
        inputs = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    options = {"config_groups": {"group_0": scheme}, "ignore": task["ignore"]}
    if task["method"] == "awq":
        return [AWQModifier(), QuantizationModifier(**options)]
    # By default it orders columns by their activations, which few kernels read.
    gptq = GPTQModifier(actorder=None, **options)
    if task["method"] == "smoothquant":
        return [SmoothQuantModifier(smoothing_strength=task["strength"]), gptq]
    return [gptq]


if __name__ == "__main__":
    main(sys.argv[1])
