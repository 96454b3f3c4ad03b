"""The engine in a plain process, for notebooks and scripts: `LLM(model_dir).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from collections.abc import Sequence as Items
from pathlib import Path
from typing import TYPE_CHECKING

from raytide.actors.engine.config import EngineConfig
from raytide.actors.engine.core import Completion, EngineStats, GenRequest, Message, RequestOutput, Usage
from raytide.actors.engine.loop import EngineLoop, Failure
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.core.errors import RaytideError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LLM"]

Sampling = SamplingParams | Items[SamplingParams] | None


class LLM:
    """A model of a Hugging Face directory. `engine_options` are the fields of `EngineConfig`."""

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
        self._loop = EngineLoop(EngineConfig.parse(fields, where="LLM"))
        self.info = self._loop.info
        self._count = 0

    def generate(self, prompts: str | Items[str] | Items[Items[int]], sampling: Sampling = None) -> list[RequestOutput]:
        """Answers in the order of the prompts, which are texts or lists of token ids; all run together.

        `sampling` is one SamplingParams for all or a list with one each. A prompt that is empty or too long raises
        UsageError before anything runs; a request that fails while running has finish reason "error".
        """
        texts: list[str | Items[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        tokens = [self._tokens(text) for text in texts]
        params = [sampling or SamplingParams()] * len(tokens) if not isinstance(sampling, Items) else list(sampling)
        if len(params) != len(tokens):
            raise UsageError(
                f"{len(tokens)} prompts but {len(params)} sampling parameters.", hint="Give one, or one each."
            )
        outputs = self._run(tokens, params)
        for output, text in zip(outputs, texts, strict=True):
            output.prompt = text if isinstance(text, str) else None
        return outputs

    def chat(
        self, messages: Items[Message | Mapping[str, str]], sampling: SamplingParams | None = None
    ) -> RequestOutput:
        """The model's next turn in a conversation, by its chat template."""
        turns = [each if isinstance(each, Message) else Message(each["role"], each["content"]) for each in messages]
        return self._run([self._loop.tokenizer.chat_prompt(turns)], [sampling or SamplingParams()])[0]

    def logits(self, token_ids: Items[int]) -> Tensor:
        """float32 [T, V]: row t is the model's prediction after the first t + 1 tokens of a prompt. For checks."""
        return self._loop.prompt_logits(token_ids)

    def _tokens(self, prompt: str | Items[int]) -> list[int]:
        return self._loop.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def stats(self) -> EngineStats:
        """Counters since the engine was made."""
        return self._loop.stats()

    def _run(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        try:
            for tokens, each in zip(prompts, params, strict=True):
                self._count += 1
                request_id = f"prompt {self._count}"
                self._loop.add(GenRequest(request_id=request_id, prompt=tokens, sampling=each), tokens)
                outputs[request_id] = RequestOutput(None, tokens, [Completion("", [], "error")], Usage(len(tokens), 0))
            while self._loop.has_work:
                for output in self._loop.step():
                    answer, completion = outputs[output.request_id], outputs[output.request_id].outputs[0]
                    if isinstance(output, Failure):
                        completion.error = str(output.error)
                        continue
                    completion.text += output.text
                    completion.token_ids += output.token_ids
                    completion.finish_reason = output.finish_reason or completion.finish_reason
                    answer.usage = output.usage or answer.usage
        except (RaytideError, KeyboardInterrupt):
            for request_id in outputs:
                self._loop.abort(request_id)
            raise
        return list(outputs.values())
