"""The main path in one process and without Ray: real text, a dataset, a model, its export, the same tokens twice."""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import raytide as rt
from raytide.actors.trainer.runners.local import train_local
from raytide.actors.trainer.types import StepResult
from raytide.core.specs.data import DataSpec, TokenizerSpec, TrainTokenizer
from raytide.core.specs.model import ModelSpec
from raytide.core.specs.train import OptimSpec, TrainSpec
from raytide.pipelines.build import build
from raytide.pipelines.runners.inline import InlineRunner

NEW_TOKENS = 32
TIE = 1e-4
"""A difference of the reference's top two logits: closer than this, either choice is right."""

PROMPTS = (
    "def main(",
    "import os",
    "class Node:",
    '"""Return the',
    "for i in range(",
    "try:\n    ",
    "from collections import",
    "    def __init__(self",
    "if __name__ == '__main__':\n",
    "raise ValueError(",
    "return",
    "# The",
    "x",
    "with open(path) as",
    "        self._lock = ",
    "\n\n\n",
    "naïve café, 東京 and 🙂",
    "async def read(self, n=-1):\n        data = await self._reader.read(n)\n        return data\n",
    "assert isinstance(value, (int, float)), " * 6,
    "the end<|endoftext|>import",
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of the standard library, as every machine with Python has it."""
    out = tmp_path_factory.mktemp("main-path") / "dataset"
    stdlib = Path(sysconfig.get_path("stdlib"))
    spec = DataSpec(
        inputs=tuple(str(stdlib / name) for name in ("json", "email", "ast.py", "argparse.py", "typing.py")),
        include=(".py",),
        tokenizer=TokenizerSpec(train=TrainTokenizer(vocab_size=768)),
        out=str(out),
    )
    build(spec, runner=InlineRunner())
    return out


def train_spec(dataset: Path, out: Path, **changes: object) -> TrainSpec:
    return TrainSpec(
        dataset=str(dataset),
        out=str(out),
        model=ModelSpec(dim=64, layers=2, heads=4, kv_heads=2, max_seq_len=256),
        optim=OptimSpec(lr=1e-2, warmup_steps=10),
        steps=400,
        global_batch=8,
        micro_batch=8,
        seq_len=64,
    ).model_copy(update=changes)


@pytest.fixture(scope="module")
def model_dir(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = train_local(train_spec(dataset, tmp_path_factory.mktemp("run")))
    assert result.first_loss is not None
    assert result.loss is not None
    assert result.loss < result.first_loss - 2.0, "it has learned something"
    assert result.model_dir is not None
    return Path(result.model_dir)


@dataclass(frozen=True, slots=True)
class Reference:
    """The model that transformers makes of the exported directory."""

    model: Any
    tokenizer: Any

    def greedy(self, prompt: list[int]) -> list[int]:
        with torch.inference_mode():
            ids = self.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS)
        return [int(token) for token in ids[0, len(prompt) :]]

    def margin(self, tokens: list[int]) -> float:
        """Returns by how much its first choice after these tokens beats its second."""
        with torch.inference_mode():
            first, second = self.model(torch.tensor([tokens])).logits[0, -1].topk(2).values
        return float(first - second)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Reference:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    return Reference(model, AutoTokenizer.from_pretrained(model_dir))


@pytest.fixture(scope="module")
def answers(model_dir: Path) -> list[Any]:
    return rt.LLM(model_dir).generate(list(PROMPTS), rt.SamplingParams(temperature=0, max_tokens=NEW_TOKENS))


def without_end(tokens: list[int], eos_id: int) -> list[int]:
    return tokens[: tokens.index(eos_id)] if eos_id in tokens else tokens


def test_transformers_and_raytide_read_and_write_text_alike(answers: list[Any], reference: Reference) -> None:
    for text, answer in zip(PROMPTS, answers, strict=True):
        assert answer.prompt_token_ids == reference.tokenizer(text)["input_ids"]
        ours = answer.outputs[0]
        assert ours.text == reference.tokenizer.decode(ours.token_ids, skip_special_tokens=True)


def test_greedy_tokens_are_those_of_transformers_or_differ_first_at_a_tie(
    answers: list[Any], reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    ties, compared, seen = 0, 0, set()
    for answer in answers:
        prompt = answer.prompt_token_ids
        ours = without_end(answer.outputs[0].token_ids, reference.tokenizer.eos_token_id)
        theirs = without_end(reference.greedy(prompt), reference.tokenizer.eos_token_id)
        compared += len(ours)
        seen |= set(ours)
        if ours == theirs:
            continue
        same = next(at for at in range(NEW_TOKENS) if ours[at : at + 1] != theirs[at : at + 1])
        margin = reference.margin(prompt + theirs[:same])
        assert margin < TIE, f"{answer.prompt!r} differs at token {same}, where {margin:g} is between the top two"
        ties += 1
    assert compared > 10 * len(PROMPTS), "answers that end at once compare nothing"
    assert len(seen) > 20, "a model that repeats one token would agree by accident"
    with capsys.disabled():
        sys.stdout.write(f"\n{len(PROMPTS)} prompts, {compared} greedy tokens compared, {ties} ties used\n")


class Stopped(BaseException):
    """As abrupt as a signal: nothing in the trainer catches it."""


def losses(spec: TrainSpec, *, stop_after: int | None = None) -> dict[int, float]:
    """Returns the losses by step, as `train_local` reports them."""
    seen: dict[int, float] = {}

    def keep(result: StepResult) -> None:
        seen[result.step] = result.loss
        if result.step == stop_after:
            raise Stopped

    try:
        train_local(spec, on_step=keep)
    except Stopped:
        assert stop_after is not None
    return seen


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resume_after_a_stop_gives_bit_equal_losses_and_weights(
    dataset: Path, tmp_path: Path, precision: str
) -> None:
    """Stopped in step 8 and again in step 11, with checkpoints after 3, 6, 9, ...: the steps in between are redone."""
    few = {"steps": 14, "checkpoint_every": 3, "precision": precision}
    unbroken = train_spec(dataset, tmp_path / "unbroken", **few)
    broken = train_spec(dataset, tmp_path / "broken", **few)

    whole = losses(unbroken)
    parts = [losses(broken, stop_after=8), losses(broken, stop_after=11), losses(broken)]

    assert [max(part) for part in parts] == [8, 11, 14]
    begun = [
        min(part) for part in parts
    ]  # after the newest checkpoint that was whole: they are written in the background
    assert begun[0] == 1
    assert all(1 < begin <= stopped and begin % 3 == 1 for begin, stopped in zip(begun[1:], (8, 11), strict=True))
    for part in parts:
        assert part == {step: whole[step] for step in part}
    weights = [Path(spec.out, "model", "model.safetensors").read_bytes() for spec in (unbroken, broken)]
    assert weights[0] == weights[1]
    assert len({json.dumps(loss) for loss in whole.values()}) == 14
