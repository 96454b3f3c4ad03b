"""The section `metadata.raytide.slurm`: node types whose nodes are jobs of a Slurm cluster. Slurm queues these jobs,
grants them machines, and takes the machines back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated

from pydantic import Field, field_validator

from raytide.core.config import Config
from raytide.core.errors import ConfigError
from raytide.core.objects.node import NodeType

Word = Annotated[str, Field(pattern=r"^[^\s\x00-\x1f-][^\x00-\x1f]*$", max_length=1024)]
_PATH = r"^(~/|/)[A-Za-z0-9_./+@-]+$"
_OWN_OPTIONS = (
    *("--job-name", "--comment", "--nodes", "--ntasks", "--cpus-per-task", "--output", "--error", "--parsable"),
    *("--wrap", "--array", "--export", "--chdir", "--signal", "--wait", "--test-only"),
)


class SlurmJobSection(Config):
    """The options of `sbatch` for the jobs of one node type. The numbers of CPUs and GPUs come from the node type's
    resources, but `gres` overrides the number of GPUs."""

    partition: Word | None = None
    constraint: Word | None = None
    gres: Word | None = None
    """The option `--gres`, such as `gpu:a100:8`; by default `gpu:N` for a node type with N GPUs."""
    account: Word | None = None
    qos: Word | None = None
    reservation: Word | None = None
    memory_gb: float | None = Field(default=None, gt=0, le=100_000)
    """The memory of the job in units of 2^30 bytes; by default the partition's own default."""
    time_limit_s: float | None = Field(default=None, ge=60, le=366 * 86_400)
    """The seconds after which Slurm ends the job, rounded to whole minutes; by default the partition's own limit."""
    exclusive: bool = False
    """True if the job does not share its machine."""
    options: tuple[Annotated[str, Field(pattern=r"^--[a-z][^\x00-\x1f]*$", max_length=1024)], ...] = Field(
        default=(), max_length=50
    )
    """Further options of `sbatch`, such as `--licenses=nvlink`."""

    @field_validator("options")
    @classmethod
    def _not_own(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            if (name := option.partition("=")[0]) in _OWN_OPTIONS:
                raise ValueError(f"raytide decides {name} itself")
        return options

    def arguments(self, node_type: NodeType) -> list[str]:
        """Returns the options of `sbatch` for one node of this type."""
        gpus = math.ceil(node_type.resources.get("GPU", 0))
        valued = {
            "--cpus-per-task": max(1, math.ceil(node_type.resources.get("CPU", 1))),
            "--partition": self.partition,
            "--constraint": self.constraint,
            "--gres": self.gres or (f"gpu:{gpus}" if gpus else None),
            "--account": self.account,
            "--qos": self.qos,
            "--reservation": self.reservation,
            "--mem": None if self.memory_gb is None else f"{math.ceil(self.memory_gb * 1024)}M",
            "--time": None if self.time_limit_s is None else math.ceil(self.time_limit_s / 60),
        }
        alone = ["--exclusive"] if self.exclusive else []
        return [f"{name}={value}" for name, value in valued.items() if value is not None] + alone + [*self.options]


class SlurmSection(Config):
    """The section `metadata.raytide.slurm`, which lists node types. Each node of these types is a Slurm job, which the
    head submits with `sbatch`."""

    node_types: dict[str, SlurmJobSection] = Field(min_length=1, max_length=1000)
    python: str = Field(default="~/venv/bin/python", pattern=_PATH, max_length=4096)
    """The interpreter on Slurm's machines that has raytide, of the same version as the head's."""
    bin: str = Field(default="", pattern=r"^((~/|/)[^\x00-\x1f]*)?$", max_length=4096)
    """The folder of `sbatch`, `squeue`, `scancel` and `scontrol` on the head; by default they are found on the PATH."""
    conf: str = Field(default="", pattern=r"^((~/|/)[^\x00-\x1f]*)?$", max_length=4096)
    """SLURM_CONF of the Slurm cluster, where it is not the default one."""
    folder: str = Field(default="", pattern=r"^((~/|/)[^\x00-\x1f]*)?$", max_length=4096)
    """A folder on the head that Slurm's machines see under the same path, for requests and logs of nodes.

    By default it is in the run folder, and so in the home directory, which Slurm's machines usually share.
    """
    poll_s: float = Field(default=5.0, ge=0.5, le=600)
    """The time between two calls of `squeue`."""
    notice_s: float = Field(default=120.0, ge=0, le=86_400)
    """The seconds before the end of a job at which its work is moved away."""


def check_slurm(section: SlurmSection, node_types: Iterable[NodeType], *, where: str) -> None:
    """Raises ConfigError if one of Slurm's node types does not exist or has several zones."""
    known = {node_type.name: node_type for node_type in node_types}
    for name in section.node_types:
        if name not in known:
            raise ConfigError(
                f"{where}: metadata.raytide.slurm.node_types.{name} has no node type of that name.",
                hint=f"Add it to available_node_types. There are: {', '.join(sorted(known)) or 'none'}.",
            )
        if len(known[name].zones) != 1:
            raise ConfigError(
                f"{where}: node type {name} has the zones {', '.join(known[name].zones)}, and Slurm chooses machines.",
                hint="Name one zone; another partition is another node type.",
            )
