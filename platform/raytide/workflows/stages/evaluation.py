"""The process of an eval stage: `python -m raytide.workflows.stages.evaluation SPEC`, on a leased node.

It writes the metrics atomically to RAYTIDE_STAGE_OUT/metrics.json.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from raytide.core.config import environment
from raytide.core.errors import DataError, EngineError, RaytideError
from raytide.core.io.environment import without_proxy
from raytide.core.io.storage import join, read_bytes, write_bytes
from raytide.workflows.stages.configs import EvalSpec
from raytide.workflows.stages.runner import METRICS_FILE

_MOST_PROMPTS = 10_000
_TIMEOUT_S = 120.0


def held_out_loss(spec: EvalSpec) -> dict[str, float]:
    """Returns the metrics `loss`, `perplexity` and `tokens` of the model on the dataset. The loss is the mean cross
    entropy in nats a token, and the perplexity is exp(loss). `tokens` is the number of predicted tokens.

    Sequences of `seq_len` + 1 tokens follow one another without overlap. Documents are not separated, which is also the
    default in training.
    """
    import numpy as np
    import torch

    from raytide.actors.models.families import architecture_of
    from raytide.actors.models.model_config import read_json
    from raytide.actors.trainer.data.token_dataset import TokenData
    from raytide.actors.trainer.hf.init_weights import load_or_initialise
    from raytide.actors.trainer.hf.model_source import ModelSource, model_folder
    from raytide.actors.trainer.model.transformer import Transformer

    folder = model_folder(spec.model)
    config = read_json(folder / "config.json")
    arch = architecture_of(config, str(folder))
    data = TokenData(spec.dataset, spec.seq_len)
    if data.vocab_size > arch.vocab_size:
        raise DataError(
            f"{spec.dataset} has a vocabulary of {data.vocab_size}, and {folder} one of {arch.vocab_size}.",
            hint="Evaluate on a dataset of the model's tokenizer.",
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Transformer(arch, spec.seq_len).to(device).eval()
    load_or_initialise(model, ModelSource(config, arch, folder, ""), seed=0)
    count, total, tokens = min(data.n_sequences, spec.max_sequences or data.n_sequences), 0.0, 0
    with torch.inference_mode():
        for start in range(0, count, spec.batch):
            ids = np.arange(start, min(start + spec.batch, count))
            inputs, targets = (torch.from_numpy(each.copy()).to(device) for each in data.examples(ids))
            total += float(model(inputs, targets))
            tokens += targets.numel()
    loss = total / tokens
    if not math.isfinite(loss):
        raise DataError(f"the loss of {folder} on {spec.dataset} is {loss}.", hint="The model is broken: train again.")
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": float(tokens)}


def answers(spec: EvalSpec, ask: Callable[[str], str] | None = None) -> dict[str, float]:
    """Returns two metrics: `accuracy`, the share of prompts that were answered as expected, and `prompts`, the number
    of prompts.

    `ask(prompt)` returns the answer to a prompt. By default it asks the spec's endpoint, which samples greedily.
    Raises EngineError if the endpoint refuses a prompt or does not answer.
    """
    cases = read_cases(spec.prompts)
    ask = ask or _endpoint(spec)
    right = sum(is_right(ask(str(case["prompt"])), case) for case in cases)
    return {"accuracy": right / len(cases), "prompts": float(len(cases))}


def suite_metrics(spec: EvalSpec) -> dict[str, float]:
    """Evaluates the model with the spec's suite and returns the metrics. Raises DataError if the suite's gate is not
    passed.
    """
    from raytide.actors.quality.evaluate import evaluate
    from raytide.actors.quality.suite import broken_limits

    assert spec.suite is not None
    metrics = evaluate(spec.model, spec.suite).metrics()
    if broken := broken_limits(spec.suite.gate, metrics):
        raise DataError(f"the gate is not passed: {'; '.join(broken)}.", hint="Compress less, or raise the limits.")
    return metrics


def read_cases(url: str) -> list[Mapping[str, Any]]:
    """Returns the prompts of a JSONL file, each with its expected answer. Raises DataError for a malformed line. The
    error names the line.
    """
    cases: list[Mapping[str, Any]] = []
    for number, line in enumerate(read_bytes(url).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            case = json.loads(line)
        except ValueError as error:
            raise DataError(f"{url}, line {number}: {error}.", hint="Write one JSON object a line.") from None
        expected = case.get("expect", case.get("matches")) if isinstance(case, dict) else None
        if not isinstance(expected, str) or not isinstance(case.get("prompt"), str):
            raise DataError(
                f"{url}, line {number}: it has no texts `prompt` and `expect` or `matches`.", hint="Correct the line."
            )
        try:
            re.compile(case.get("matches", ""))
        except re.error as error:
            raise DataError(f"{url}, line {number}: `matches` is no pattern: {error}.", hint="Correct it.") from None
        cases.append(case)
    if not cases or len(cases) > _MOST_PROMPTS:
        raise DataError(
            f"{url} has {len(cases)} prompts; 1 to {_MOST_PROMPTS:,} are evaluated.", hint="Check the file."
        )
    return cases


def is_right(answer: str, case: Mapping[str, Any]) -> bool:
    if "matches" in case:
        return re.search(case["matches"], answer) is not None
    return case["expect"] in answer


def _endpoint(spec: EvalSpec) -> Callable[[str], str]:
    from openai import DefaultHttpxClient, OpenAI, OpenAIError

    http = DefaultHttpxClient(mounts=without_proxy(spec.endpoint))
    key = _api_key(spec)
    client = OpenAI(base_url=spec.endpoint, api_key=key, timeout=_TIMEOUT_S, max_retries=5, http_client=http)

    def ask(prompt: str) -> str:
        try:
            answer = client.completions.create(
                model=spec.endpoint_model, prompt=prompt, max_tokens=spec.max_tokens, temperature=0.0
            )
        except OpenAIError as error:
            raise EngineError(
                f"{spec.endpoint} gave no answer: {error}",
                hint="Check its address, the model's name, and api_key_file if it needs a key.",
            ) from error
        return str(answer.choices[0].text)

    return ask


def _api_key(spec: EvalSpec) -> str:
    if not spec.api_key_file:
        return "none"
    key = read_bytes(spec.api_key_file).decode(errors="replace").strip()
    if not key.isascii() or len(key.split()) != 1:  # no header could carry it
        raise DataError(f"{spec.api_key_file} is no API key.", hint="Write the key into the file, and nothing else.")
    return key


def main(text: str) -> int:
    spec = EvalSpec.parse(json.loads(text), where="eval")
    try:
        found = {
            **(held_out_loss(spec) if spec.dataset else {}),
            **(answers(spec) if spec.prompts else {}),
            **(suite_metrics(spec) if spec.suite is not None else {}),
        }
        write_bytes(join(environment("STAGE_OUT") or ".", METRICS_FILE), json.dumps(found).encode())
    except RaytideError as error:
        sys.stderr.write(f"{error.code}: {error}\n")
        return error.exit_code
    sys.stdout.write(", ".join(f"{name} {value:.6g}" for name, value in found.items()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
