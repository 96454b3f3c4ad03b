"""The engine in a plain process, for notebooks and scripts: `LLM(model_dir).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from raytide.actors.engine.backends.native import operations
from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.backends.native.output_processor import PooledOutput, RequestFailure
from raytide.actors.engine.config import EngineConfig
from raytide.actors.engine.model.pooling import pooling_of
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.sequence import PooledPrompt
from raytide.actors.engine.types import (
    PLAIN_PROMPT,
    CompletionOutput,
    EngineStats,
    GenChunk,
    GenRequest,
    Message,
    PromptOptions,
    RequestOutput,
    TokenUsage,
)
from raytide.core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

Sampling = SamplingParams | Items[SamplingParams] | None


class LLM:
    """A language model, loaded from a Hugging Face directory. `engine_options` are fields of `EngineConfig`."""

    def __init__(
        self, model_dir: str | Path, dtype: str = "float32", device: str = "auto", **engine_options: object
    ) -> None:
        fields = {
            "model_dir": str(model_dir),
            "dtype": dtype,
            "device": device,
            "max_waiting": sys.maxsize,
            **engine_options,
        }
        config = EngineConfig.parse(fields, where="LLM")
        self._core = EngineCore(config)
        self.info = self._core.info
        self._count = 0

    def generate(
        self,
        prompts: str | Items[str] | Items[Items[int]],
        sampling: Sampling = None,
        *,
        lora: str | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Returns the answers in the order of the prompts. Each prompt is a text or a list of token ids. All prompts
        run together.

        `sampling` is one SamplingParams for all prompts, or a list with one SamplingParams for each prompt. A prompt
        that is empty or too long raises UsageError before anything runs. A request that fails while it runs has finish
        reason "error". `lora` names a loaded adapter. `progress` shows a bar on stderr.
        """
        texts: list[str | Items[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        tokens = [self._tokens(text) for text in texts]
        params = [sampling or SamplingParams()] * len(tokens) if not isinstance(sampling, Items) else list(sampling)
        if len(params) != len(tokens):
            raise UsageError(
                f"{len(tokens)} prompts but {len(params)} sampling parameters.",
                hint="Give one for all prompts, or one for each prompt.",
            )
        outputs = self._run(tokens, params, lora, progress)
        for output, text in zip(outputs, texts, strict=True):
            output.prompt = text if isinstance(text, str) else None
        return outputs

    def chat(
        self,
        messages: Items[Message | Mapping[str, str]],
        sampling: SamplingParams | None = None,
        *,
        images: Items[bytes] = (),
        options: PromptOptions = PLAIN_PROMPT,
    ) -> RequestOutput:
        """Renders a conversation with the model's chat template, and returns the model's next turn.

        Each None in the messages' `parts` stands for an image. `images` are the image files in the same order.
        `options` hold the template's variables, such as `enable_thinking`.
        """
        turns = [each if isinstance(each, Message) else Message(each["role"], each["content"]) for each in messages]
        prompt = self._core.tokenizer.chat_prompt(turns, options=options)
        return self._run([prompt], [sampling or SamplingParams()], images=tuple(images))[0]

    def logits(self, token_ids: Items[int]) -> Tensor:
        """Returns float32 logits [T, V] for a prompt, for tests and comparisons. Row t is the model's prediction after
        the first t + 1 tokens.
        """
        return self._core.prompt_logits(token_ids)

    def embed(self, prompts: str | Items[str] | Items[Items[int]]) -> list[list[float]]:
        """Returns one embedding for each prompt, scaled to a Euclidean norm of 1. By default, the embedding is the
        hidden state of the last token. The model directory may state another way to pool the hidden states.
        """
        pooling = pooling_of(self._core.weights.model_dir)
        return self._pool(prompts, lambda: PooledPrompt(pooling))

    def classify(self, prompts: str | Items[str] | Items[Items[int]]) -> list[list[float]]:
        """Returns, for each prompt, the logits of the labels from the model's classification head."""
        if not self.info.num_labels:
            raise UsageError(f"{self.info.model} has no classification head.", hint="Use embed() for vectors.")
        return self._pool(prompts, lambda: PooledPrompt("last", classify=True))

    def load_lora(self, name: str, path: str | Path) -> None:
        """Loads a PEFT adapter under `name`."""
        operations.load_lora(self._core, name, str(path))

    def unload_lora(self, name: str) -> None:
        operations.unload_lora(self._core, name)

    def load_weights(self, source: str | Path, version: str | None = None) -> str:
        """Loads the weights of another directory with the same architecture, and returns their version."""
        model, weights = operations.read_weights(self._core, str(source), version)
        operations.use_weights(self._core, model, weights)
        self.info = self._core.info
        return weights.version

    def stats(self) -> EngineStats:
        """Returns the counters since the engine was created."""
        return self._core.stats()

    def close(self) -> None:
        """Writes cached prefixes to `local_disk`, and ends the other processes of `tensor_parallel`. Do not use the
        object afterwards. Without a call to `close`, those processes end when this process ends.
        """
        operations.flush_to_disk(self._core)
        self._core.close()

    def _tokens(self, prompt: str | Items[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._core.tokenizer.encode(prompt)
        if isinstance(prompt, int):
            raise UsageError("a prompt is one token id.", hint="Give a list of texts, or a list of lists of token ids.")
        return list(prompt)

    def _pool(
        self, prompts: str | Items[str] | Items[Items[int]], pooled: Callable[[], PooledPrompt]
    ) -> list[list[float]]:
        texts: list[str | Items[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        tokens = [self._core.input_processor.checked(f"input {i}", self._tokens(text)) for i, text in enumerate(texts)]
        vectors: dict[str, list[float]] = {}
        try:
            for prompt in tokens:
                self._count += 1
                request = GenRequest(request_id=f"prompt {self._count}", prompt=prompt)
                vectors[request.request_id] = []
                self._core.add_pooled(request, prompt, pooled())
            while self._core.has_work:
                for output in self._core.step():
                    if isinstance(output, RequestFailure):
                        raise output.error
                    if isinstance(output, PooledOutput):
                        vectors[output.request_id] = output.vector
        except BaseException as error:
            self._distrust_cache(error)
            raise
        finally:
            for request_id in vectors:
                self._core.abort(request_id)
            self._core.drain_outputs()
        return list(vectors.values())

    def _run(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        lora: str | None = None,
        progress: bool = False,
        images: tuple[bytes, ...] = (),
    ) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        done = made = 0
        try:
            for tokens, each in zip(prompts, params, strict=True):
                self._count += 1
                request_id = f"prompt {self._count}"
                request = GenRequest(request_id=request_id, prompt=tokens, sampling=each, lora=lora, images=images)
                self._core.add(request, tokens)
                empty = [CompletionOutput("", [], "error") for _ in range(each.n)]
                outputs[request_id] = RequestOutput(None, tokens, empty, TokenUsage(len(tokens), 0))
            with progress_bar(len(prompts), shown=progress) as update:
                while self._core.has_work:
                    for output in self._core.step():
                        assert not isinstance(output, PooledOutput)
                        ended = _take_in(output, outputs[output.request_id])
                        done += ended
                        made += 0 if isinstance(output, RequestFailure) else len(output.token_ids)
                    update(done, made)
        except BaseException as error:
            self._distrust_cache(error)
            for request_id in outputs:
                self._core.abort(request_id)
            self._core.drain_outputs()
            raise
        return list(outputs.values())

    def _distrust_cache(self, error: BaseException) -> None:
        """Discards all KV after an error such as Ctrl-C, which may have come between a step's plan and the end of its
        moves: blocks are then known by the hashes of prefixes that they do not hold.
        """
        if not isinstance(error, Exception):
            self._core.scheduler.invalidate()


def _take_in(output: GenChunk | RequestFailure, answer: RequestOutput) -> bool:
    """Adds an output to its request's answer; returns whether the answer is complete."""
    if isinstance(output, RequestFailure):
        for completion in answer.outputs:
            completion.finish_reason, completion.error = "error", str(output.error)
        return True
    completion = answer.outputs[output.index]
    completion.text += output.text
    completion.token_ids += output.token_ids
    completion.finish_reason = output.finish_reason or completion.finish_reason
    if output.logprobs is not None:
        completion.logprobs = [*(completion.logprobs or ()), *output.logprobs]
    if output.prompt_logprobs is not None:
        answer.prompt_logprobs = list(output.prompt_logprobs)
    answer.usage = output.usage or answer.usage
    return output.usage is not None


Update = Callable[[int, int], None]  # answers done, tokens made

_EVERY_S = 0.2


@contextmanager
def progress_bar(total: int, *, shown: bool) -> Iterator[Update]:
    """Shows progress on stderr: as a bar if rich is installed, else as one line of text. Yields the function that
    reports progress.
    """
    if not shown:
        yield lambda done, tokens: None
        return
    has_rich = importlib.util.find_spec("rich") is not None
    with _rich_bar(total) if has_rich else _plain_line(total) as update:
        yield update


@contextmanager
def _rich_bar(total: int) -> Iterator[Update]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task, began = bar.add_task("answers", total=total, rate=""), time.monotonic()
        yield lambda done, tokens: bar.update(task, completed=done, rate=_rate(tokens, began))


@contextmanager
def _plain_line(total: int) -> Iterator[Update]:
    began = shown_s = time.monotonic()

    def update(done: int, tokens: int) -> None:
        nonlocal shown_s
        now_s = time.monotonic()
        if now_s - shown_s >= _EVERY_S or done == total:
            shown_s = now_s
            sys.stderr.write(f"\ranswers {done}/{total}, {_rate(tokens, began)} ")
            sys.stderr.flush()

    try:
        yield update
    finally:
        sys.stderr.write("\n")


def _rate(tokens: int, began_s: float) -> str:
    return f"{tokens / max(1e-9, time.monotonic() - began_s):,.0f} tokens/s"
