"""The request bodies of OpenAI's HTTP API, field for field as the official client types them.

Fields of a request that are not listed here stay in `model_extra`. `params` ignores or refuses these fields.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
)

from raytide.actors.engine.limits import (
    MAX_ARGUMENT_CHARS,
    MAX_BAD_WORDS,
    MAX_EMBEDDING_INPUTS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_PROMPTS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TEMPLATE_KWARGS,
    MAX_TIMEOUT_S,
    MAX_TOOLS,
    MAX_WORD_CHARS,
)
from raytide.actors.serving.openai_api.fields.structure import Constraints
from raytide.actors.serving.openai_api.fields.truncation import TruncationFields

Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
Int64 = Annotated[
    int,
    Field(ge=-(2**63), lt=2**63),
    # FastAPI writes them as doubles, which are multiples of 1024 here
    WithJsonSchema({"type": "integer", "minimum": 1024 - 2**63, "maximum": 2**63 - 1024}),
]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD_CHARS)]
Tokens = Annotated[list[TokenId], Field(fail_fast=True)]


def _form(value: object) -> str:
    """Returns which of OpenAI's four forms a prompt has, judged by its first item only. Trying all four would take time
    and report an error for each item of a long list.
    """
    if not isinstance(value, list):
        return "str"
    first = value[0] if value else 0
    return "list[str]" if isinstance(first, str) else "list[list[int]]" if isinstance(first, list) else "list[int]"


def _prompts(most: int) -> object:
    """Returns the type of a prompt or an input, a union whose tags clients never see."""
    return Annotated[
        Annotated[str, Tag("str")]
        | Annotated[list[str], Field(fail_fast=True, max_length=most), Tag("list[str]")]
        | Annotated[list[TokenId], Field(fail_fast=True, min_length=1), Tag("list[int]")]
        | Annotated[list[Tokens], Field(fail_fast=True, max_length=most), Tag("list[list[int]]")],
        Discriminator(_form),
    ]


if TYPE_CHECKING:
    Prompts = str | list[str] | list[int] | list[list[int]]
    Inputs = Prompts
else:
    Prompts = _prompts(MAX_PROMPTS)
    Inputs = _prompts(MAX_EMBEDDING_INPUTS)


def only_these(ignored: frozenset[str]) -> Callable[[dict[str, Any]], None]:
    """Returns a function that changes a request's JSON schema. The changed schema allows the fields that the request
    type defines and the `ignored` fields. Any other field must be null. This describes the behaviour of
    `params.refuse_unknown`.
    """

    def change(schema: dict[str, Any]) -> None:
        schema["additionalProperties"] = {"type": "null"}
        schema["properties"] = {name: {} for name in sorted(ignored)} | schema["properties"]

    return change


NO_EFFECT = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "stream_interval",
        "user",
        "verbosity",
    }
)
"""Known fields that change no answer, unless a request type defines them, as chats define `reasoning_effort`."""


class _Request(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


_Stop = Annotated[
    str,
    Field(max_length=MAX_WORD_CHARS),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MAX_WORD_CHARS}),
]


class StreamOptions(_Request):
    include_usage: bool = False
    continuous_usage_stats: bool = False


def _not_too_many(bias: object) -> object:
    """Raises ValueError if there are too many entries, before they are parsed."""
    if isinstance(bias, dict) and len(bias) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(bias)} tokens; at most {MAX_LOGIT_BIAS} are taken")
    return bias


LogitBias = Annotated[
    dict[Annotated[TokenId, Field(strict=False)], Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(_not_too_many),
    # pydantic says nothing of the keys
    WithJsonSchema(
        {
            "type": "object",
            "patternProperties": {"^(0|[1-9][0-9]{0,8})$": {"type": "number", "minimum": -100, "maximum": 100}},
            "additionalProperties": False,
            "maxProperties": MAX_LOGIT_BIAS,
        }
    ),
]


class GenerationRequest(_Request, Constraints, TruncationFields):
    """The fields that chats and plain completions share. The fields from `top_k` on are extensions, as in vLLM."""

    model_config = ConfigDict(json_schema_extra=only_these(NO_EFFECT))

    model: Name
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    seed: Int64 | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: LogitBias | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    stop_token_ids: Annotated[Tokens, Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    bad_words: Annotated[list[Word], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    priority: Int32 | None = None
    cache_salt: Name | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def includes_usage_always(self) -> bool:
        """True if each event of a stream must contain the usage up to that event."""
        return self.includes_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionRequest(GenerationRequest):
    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class FunctionDefinition(_Request):
    name: Name
    description: Annotated[str, Field(max_length=MAX_ARGUMENT_CHARS)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Request):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(_Request):
    name: Name


class ToolName(_Request):
    type: Literal["function"] = "function"
    function: FunctionName


class AllowedTools(_Request):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolName], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class NamedToolChoice(_Request):
    type: Literal["function"]
    function: FunctionName


class AllowedToolsChoice(_Request):
    """A tool choice that allows only some of the tools. `mode` says whether the model must call one of the allowed
    tools.
    """

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[NamedToolChoice | AllowedToolsChoice, Field(discriminator="type")]


class FunctionCall(_Request):
    name: Name
    arguments: Annotated[str, Field(max_length=MAX_ARGUMENT_CHARS)]


class ToolCall(_Request):
    """A tool call of the assistant, in an answer or in the history of a chat."""

    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall


class ImageUrl(_Request):
    url: str
    detail: Literal["auto", "low", "high"] | None = None  # the model has one size


class ContentPart(_Request):
    type: Name
    text: str | None = None
    image_url: ImageUrl | str | None = None


class ChatMessage(_Request):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_call_id: Name | None = None


class ChatRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Name | None = None
    chat_template_kwargs: Annotated[dict[Name, Any], Field(max_length=MAX_TEMPLATE_KWARGS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
