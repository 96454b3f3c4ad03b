"""The options of an engine: model, number formats, KV memory and the limits of a step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from raytide.core.config import Config


class EngineConfig(Config):
    """The options of the native engine.

    `max_batch_tokens` is the token budget of one step. It limits how long a prefill delays the running decodes, and how
    long the first prompt of a batch waits for the other prompts.
    """

    model_dir: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    max_model_len: int | None = Field(default=None, ge=2, description="default: the model's own")
    max_running: int = Field(default=64, ge=1, description="sequences in one step")
    max_waiting: int = Field(default=1024, ge=0, description="queued requests; more are refused as overloaded")
    max_batch_tokens: int | None = Field(default=None, ge=1, description="tokens in one step; default: the device's")
    block_size: int | None = Field(default=None, ge=1, description="tokens in a KV block; default: the device's")
    num_blocks: int | None = Field(default=None, ge=1, description="KV blocks; default: what kv_memory_gb holds")
    kv_memory_gb: float = Field(default=1.0, gt=0.0)
    weights_memory_gb: float | None = Field(
        default=None,
        gt=0.0,
        description="for the model's weights; layers beyond it are read from the files in every step. Default: all of "
        "them stay in memory",
    )
    kv_dtype: Literal["auto", "int8"] = Field(
        default="auto",
        description="what the KV cache holds: the model's numbers, or these rounded to int8 with a scale for each "
        "token and head, which takes about half the memory of bfloat16",
    )
    prefix_cache: bool = True
    host_memory_gb: float = Field(default=0.0, ge=0.0, description="for evicted sequences and cold prefixes; 0: none")
    local_disk: str | None = Field(
        default=None, description="a folder for prefixes that memory has no room for; others may not write to it"
    )
    max_local_disk_size: float = Field(default=5.0, gt=0.0, description="GB in local_disk, of each engine")
    policy: Literal["fcfs", "priority", "deadline"] = Field(
        default="priority", description="the order of service; among equals, and with fcfs always, by arrival"
    )
    ageing_s: float = Field(default=30.0, gt=0.0, description="a waiting request gains one priority each such time")
    team_slowdown: float | None = Field(
        default=1.15,
        ge=1.0,
        description="how many times as long a step may take, by the tokens of other teams, in which a team is answered "
        "that has less than half of its share of the load; null: no bound",
    )
    deterministic: bool = Field(default=False, description="bit-equal whatever is in the batch or the prefix cache")
    any_whitespace: bool = Field(
        default=False,
        description="JSON answers may have white space outside of strings, in which small models get lost",
    )
    quantized_input: Literal["auto", "float", "int8"] = Field(
        default="auto",
        description="what quantized weights multiply: their inputs, or these rounded to int8 in groups of 32; "
        "auto: int8 for models of a billion weights or more where an operator is made for it",
    )
    quantized_head: bool = Field(
        default=True, description="round the head of a model whose layers are quantized to int8 in groups of 32"
    )
    speculation: Literal["off", "ngram", "auto"] = Field(
        default="off",
        description="guess next tokens by the request's own text (ngram), earlier answers and draft_model (auto)",
    )
    draft_model: str | None = Field(default=None, description="a small model of the same vocabulary that guesses too")
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description="processes that share each layer; kv_memory_gb is of each",
    )
    pipeline_parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description="stages of layers, each with as many processes as tensor_parallel says; kv_memory_gb is of each",
    )
    max_loras: int = Field(default=8, ge=0, description="adapters loaded at once")
    seed: int | None = Field(default=None, description="of requests that bring none; default: from the system")

    @model_validator(mode="after")
    def _draft_model_is_used(self) -> EngineConfig:
        if self.draft_model is not None and self.speculation != "auto":
            raise ValueError(f'draft_model is only used with speculation "auto", not "{self.speculation}"')
        return self

    @model_validator(mode="after")
    def _disk_keeps_prefixes(self) -> EngineConfig:
        if self.local_disk is not None and not self.prefix_cache:
            raise ValueError("local_disk keeps cached prefixes, and prefix_cache is off")
        return self

    @model_validator(mode="after")
    def _weights_are_streamed_by_one_process(self) -> EngineConfig:
        if self.weights_memory_gb is not None and self.num_processes > 1:
            raise ValueError("weights_memory_gb is for one process; several of them hold a part each")
        return self

    @property
    def num_processes(self) -> int:
        """The number of processes that share the model's computation."""
        return self.tensor_parallel * self.pipeline_parallel

    @model_validator(mode="after")
    def _budget_holds_every_decode(self) -> EngineConfig:
        if self.max_batch_tokens is not None and self.max_batch_tokens < self.max_running:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) is below max_running ({self.max_running}), "
                "so a step could not advance every running sequence"
            )
        return self
