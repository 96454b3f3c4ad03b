"""What `raytide run` runs: one command on every member of a gang, as torchrun would start it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from raytide.core.config import Config
from raytide.core.objects.gang import Shape


class ScriptSpec(Config):
    command: tuple[str, ...] = Field(min_length=1)
    """Run without a shell; `python` is the interpreter that raytide runs with on the member."""
    package: str = ""
    """The uploaded working directory (`core.package`), by its digest; an empty directory when left out."""
    env: dict[str, str] = Field(default_factory=dict, max_length=1000)
    nproc_per_node: Annotated[int, Field(le=1024)] | Literal["gpu"] = 1
    """Processes on each member; `gpu` is one for each of its GPUs."""
    retries: int = Field(default=0, ge=0, le=10_000)
    """How often it is started again after a process ended with an error; a lost node costs none."""
    grace_s: float = Field(default=30.0, ge=0, le=3600)
    """Between SIGTERM and SIGKILL when it has to leave its nodes."""

    @field_validator("nproc_per_node")
    @classmethod
    def _some(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("at least one process on each member")
        return value

    def processes(self, shape: Shape) -> int:
        """On each member."""
        if self.nproc_per_node == "gpu":
            return max(1, int(shape.resources.get("GPU", 0)))
        return self.nproc_per_node
