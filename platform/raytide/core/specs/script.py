"""The specification of a script job: one command that runs on every member of a gang, as torchrun would start it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from raytide.core import bounds
from raytide.core.config import Config
from raytide.core.objects.gang import Shape

FLOW_RUN = "RAYTIDE_FLOW_RUN"
"""The environment variable of a flow's script that holds the id of its run."""
ATTEMPTS, FAILURES = "raytide_attempts", "raytide_failures"
"""The names of a driver's counts in its job's progress. A script reports its own numbers beside them."""


class ScriptSpec(Config):
    command: tuple[str, ...] = Field(min_length=1)
    """The command, run without a shell. `python` is raytide's interpreter on the member."""
    package: str = ""
    """The digest of the uploaded working directory; without one, the script runs in an empty directory."""
    env: dict[str, str] = Field(default_factory=dict, max_length=1000)
    pip: bounds.Requirements = ()
    """Packages that the script needs in addition to raytide's, such as `peft==0.17`. They are installed once on each
    node, with the node's own configuration of pip.
    """
    image: bounds.Image | None = None
    """The container image that the script runs in, in place of raytide's own environment: `registry/name@sha256:...`.
    It needs the nodes' Python, Ray and raytide, and podman on them."""
    nproc_per_node: Annotated[int, Field(le=1024)] | Literal["gpu"] = 1
    """The number of processes on each member; `gpu` starts one for each GPU."""
    retries: int = Field(default=0, ge=0, le=10_000)
    """The number of restarts after a process ended with an error; lost nodes do not count."""
    final_exit_codes: tuple[Annotated[int, Field(ge=1, le=127)], ...] = Field(default=(), max_length=16)
    """The exit codes after which the script is not restarted, even within `retries`, because it would fail in the same
    way.
    """
    grace_s: float = Field(default=30.0, ge=0, le=3600)
    """The seconds between SIGTERM and SIGKILL when the script must leave its nodes."""

    @field_validator("nproc_per_node")
    @classmethod
    def _some(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("each member needs at least one process")
        return value

    @model_validator(mode="after")
    def _one_environment(self) -> ScriptSpec:
        bounds.check_environment(self.pip, self.image)
        return self

    def processes(self, shape: Shape) -> int:
        """Returns the number of processes on each member."""
        if self.nproc_per_node == "gpu":
            return max(1, int(shape.resources.get("GPU", 0)))
        return self.nproc_per_node
