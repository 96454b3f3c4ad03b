"""Models that score windows of tokens. The scores of a model directory come from the native engine's forward pass. The
scores of an endpoint come from the log probabilities that the endpoint returns.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, Literal

import torch

from raytide.actors.engine.config import EngineConfig
from raytide.actors.engine.model.model_runner import ModelRunner
from raytide.actors.engine.text.tokenizer import Tokenizer
from raytide.actors.models.families import read_architecture
from raytide.actors.quality.corpus import Window
from raytide.actors.quality.divergence import negative_log_likelihood
from raytide.core.errors import ClusterError, ConfigError, DataError
from raytide.core.io.environment import without_proxy

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
QuantizedInput = Literal["auto", "float", "int8"]

_TIMEOUT_S = 300.0
_TRIES = 4


def tokenizer_of(folder: Path) -> Tokenizer | None:
    """Returns the tokenizer of a directory, or None if the directory has no tokenizer."""
    return Tokenizer(folder) if (folder / "tokenizer.json").is_file() else None


class DirectoryScorer:
    """Scores windows with the model in a directory. The native engine makes exactly the same computation when it serves
    the model, also with quantised weights.
    """

    def __init__(
        self,
        folder: Path,
        dtype: Dtype,
        window: int,
        quantized_input: QuantizedInput = "auto",
        quantized_head: bool = True,
    ) -> None:
        arch = read_architecture(folder)
        if window > arch.max_model_len:
            raise ConfigError(
                f"a window of {window} tokens is above the {arch.max_model_len} positions of {folder}.",
                hint="Lower window in the suite.",
            )
        self.folder, self.vocab_size = folder, arch.vocab_size
        config = EngineConfig(
            model_dir=str(folder),
            dtype=dtype,
            max_model_len=window,
            max_running=1,
            quantized_input=quantized_input,
            quantized_head=quantized_head,
        )
        self._runner = ModelRunner(config, arch)

    def tokenizer(self) -> Tokenizer | None:
        return tokenizer_of(self.folder)

    def logits(self, window: Window) -> torch.Tensor:
        """Returns float32 logits [T, V] that predict the window's targets. Raises DataError if a logit is not
        finite.
        """
        logits_TV = self._runner.prompt_logits(window.tokens[:-1])[window.given - 1 :]
        if not logits_TV.isfinite().all():
            raise DataError(f"{self.folder} computes logits that are not finite.", hint="Its weights are broken.")
        return logits_TV

    def nll(self, window: Window) -> torch.Tensor:
        """Returns the negative log likelihood of the window's targets, float32 [T]."""
        logits_TV = self.logits(window)
        return negative_log_likelihood(logits_TV, torch.tensor(window.targets, device=logits_TV.device))


class EndpointScorer:
    """Scores windows with a model behind an OpenAI-compatible endpoint, by completions with echo and logprobs.

    An endpoint returns the likelihoods of given tokens, but not whole distributions.
    """

    def __init__(self, base_url: str, model: str, api_key: str = "") -> None:
        import httpx

        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        mounts = without_proxy(base_url)
        self._client = httpx.Client(
            base_url=base_url.rstrip("/") + "/", headers=headers, timeout=_TIMEOUT_S, mounts=mounts
        )
        self._url = base_url
        self._model = model or self._only_model()

    def nll(self, window: Window) -> torch.Tensor:
        """Returns the negative log likelihood of the window's targets, float32 [T]. Raises ClusterError if the endpoint
        fails or refuses the request. Raises DataError if the endpoint does not return the log probabilities of the
        prompt.
        """
        body = {
            "model": self._model,
            "prompt": window.tokens,
            "echo": True,
            "logprobs": 1,
            "max_tokens": 1,
            "temperature": 0.0,
            "seed": 0,
        }
        answer = self._send("completions", body)
        try:
            values = answer["choices"][0]["logprobs"]["token_logprobs"][window.given : len(window.tokens)]
        except (KeyError, IndexError, TypeError):
            values = []
        if len(values) != len(window.targets) or not all(
            isinstance(each, int | float) and math.isfinite(each) for each in values
        ):
            raise DataError(
                f"{self._url} does not answer with the log probabilities of its prompt.",
                hint="The server must support `echo` with `logprobs` in /v1/completions.",
            )
        return -torch.tensor(values, dtype=torch.float32)

    def _only_model(self) -> str:
        names = [str(each.get("id")) for each in self._send("models").get("data", [])]
        if len(names) != 1:
            raise ConfigError(
                f"{self._url} serves {', '.join(names[:5]) or 'no model'}.", hint="Name the model by --model."
            )
        return names[0]

    def _send(self, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        import httpx

        for attempt in range(_TRIES):
            try:
                answer = self._client.get(route) if body is None else self._client.post(route, json=body)
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if answer.status_code == 200:
                    found: dict[str, Any] = answer.json()
                    return found
                problem = f"{answer.status_code}: {answer.text[:300]}"
                if answer.status_code < 500 and answer.status_code != 429:
                    break
            if attempt + 1 < _TRIES:
                time.sleep(2.0**attempt)
        raise ClusterError(f"{self._url} did not answer {route}: {problem}.", hint="Check the endpoint and its key.")
