"""A raytide request as a call of vLLM's `generate`, and vLLM's errors as raytide's."""

from __future__ import annotations

from typing import Any

from raytide.actors.engine.backends.vllm.launch import VllmCore
from raytide.actors.engine.backends.vllm.params import sampling_fields, structured_fields
from raytide.actors.engine.types import GenRequest
from raytide.core.errors import EngineDeadError, EngineError, RaytideError, UsageError

__all__ = ["call", "died", "sample_id", "tokens_prompt", "translated"]


def sample_id(request_id: str, index: int) -> str:
    """vLLM cannot end one sample of several, so each is a request of its own."""
    return f"{request_id}#{index}"


def call(
    core: VllmCore, request: GenRequest, prompt: list[int], index: int, end_ids: frozenset[int], lora: object
) -> dict[str, Any]:
    """The arguments of `generate` for one sample. `lora` is vLLM's LoRARequest or None."""
    modules, params = core.modules["sampling_params"], request.sampling
    fields = sampling_fields(
        params, index=index, room=core.max_model_len - len(prompt), end_ids=end_ids, vocab_size=core.vocab_size
    )
    if params.structured is not None:
        fields["structured_outputs"] = modules.StructuredOutputsParams(**structured_fields(params.structured))
    arguments = {
        "prompt": tokens_prompt(core, prompt, request.cache_salt),
        "sampling_params": modules.SamplingParams(output_kind=modules.RequestOutputKind.DELTA, **fields),
        "request_id": sample_id(request.request_id, index),
    }
    if "priority" in core.features:
        arguments["priority"] = request.priority
    if lora is not None:
        arguments["lora_request"] = lora
    return arguments


def tokens_prompt(core: VllmCore, prompt: list[int], cache_salt: str) -> Any:
    """Rendered where this vLLM has a form for that, which spares it a hop through a thread."""
    inputs = core.modules["inputs"]
    salt = {"cache_salt": cache_salt} if cache_salt else {}
    if hasattr(inputs, "tokens_input"):
        return inputs.tokens_input(prompt, **salt)
    return inputs.TokensPrompt(prompt_token_ids=prompt, **salt)


def translated(core: VllmCore, request_id: str, error: Exception) -> RaytideError:
    """What vLLM raised for one request, as the protocol has it."""
    if isinstance(error, RaytideError):
        return error
    if core.is_dead:
        return died(f"request {request_id} is lost")
    client = getattr(core.modules["exceptions"], "VLLMClientError", ValueError)
    if isinstance(error, (client, ValueError)):
        return UsageError(f"request {request_id}: vLLM refuses it: {error}", hint="Correct the named parameter.")
    return EngineError(f"request {request_id} failed inside vLLM: {error.__cause__ or error!r}.")


def died(consequence: str) -> EngineDeadError:
    """vLLM's core cannot be started again inside a running engine."""
    return EngineDeadError(
        f"the vLLM process has died: {consequence}.", hint="Retry on another replica; this one is to be replaced."
    )
