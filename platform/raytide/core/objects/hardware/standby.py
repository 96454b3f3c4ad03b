"""The section `metadata.raytide.standby`: several machines, of which one is the head and the others wait to take
over."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from raytide.core.config import Config
from raytide.core.errors import ConfigError

_OWN_OPTIONS = ("--head", "--address", "--node-ip-address", "--port", "--no-monitor", "--block", "--redis")


class StandbySection(Config):
    """The machines that can be a cluster's head, one at a time. All of them need the same cluster.yaml."""

    address: str
    """The IP address of the head: a floating or virtual one, which moves to the machine that takes over. Nodes, drivers
    and clients know only this address.
    """
    take_address: tuple[Annotated[str, Field(min_length=1, max_length=4096)], ...] = Field(default=(), max_length=100)
    """The command and arguments that move the address from the former head to this machine; run before Ray is started.
    Empty if something else moves it.
    """
    redis_url: Annotated[str, Field(pattern=r"^rediss?://", max_length=2048)]
    """`redis://host:port`, or `rediss://` with TLS: where Ray's GCS keeps its tables. Without a password."""
    redis_user: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,100}$")] = ""
    """The Redis user that creates a user for each head and removes the former head's; Redis' default user if empty."""
    redis_password_file: Annotated[str, Field(pattern=r"^((/|~/).*)?$", max_length=4096)] = ""
    shared_dir: Annotated[str, Field(pattern=r"^(/|~/)", max_length=4096)]
    """A folder that all heads see, such as NFS. It holds tokens, uploaded packages, purchases, and the machine of each
    node.
    """
    gcs_port: int = Field(default=6379, ge=1, le=65_535)
    ray_options: tuple[Annotated[str, Field(pattern=r"^--[a-z]", max_length=4096)], ...] = Field(
        default=(), max_length=100
    )
    """Further options of `ray start --head`, such as `--dashboard-port=8265`."""
    lease_s: float = Field(default=10.0, ge=3, le=300)
    """The seconds without a heartbeat of the head after which another machine takes over."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            ipaddress.ip_address(self.address)
        except ValueError:
            raise ValueError(
                f"address {self.address!r} is not an IP address: Ray's head binds it, and a name would keep its old one"
            ) from None
        url = urlsplit(self.redis_url)
        if not url.hostname or url.username or url.password or url.path not in ("", "/") or url.query:
            raise ValueError("redis_url is redis://HOST:PORT alone; the password belongs in redis_password_file")
        for option in self.ray_options:
            if option.startswith(_OWN_OPTIONS):
                raise ValueError(f"ray_options: raytide sets {option.partition('=')[0]} itself")
        return self

    @property
    def gcs_address(self) -> str:
        return f"{self.address}:{self.gcs_port}"

    @property
    def redis_address(self) -> tuple[str, int]:
        url = urlsplit(self.redis_url)
        return url.hostname or "", url.port or 6379

    @property
    def has_tls(self) -> bool:
        return self.redis_url.startswith("rediss:")

    def redis_password(self) -> str:
        """Returns the content of the file with Redis' password. Returns an empty text if no file is configured. Raises
        ConfigError if the file cannot be read."""
        if not self.redis_password_file:
            return ""
        path = Path(self.redis_password_file).expanduser()
        try:
            return path.read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"metadata.raytide.standby.redis_password_file: cannot read {path}: {error.strerror}.",
                hint="Copy it to each head, readable by raytide's user.",
            ) from None


def check_standby(
    section: StandbySection, state_url: str, provider: str, saved: Iterable[str] | None, *, where: str
) -> None:
    """Raises ConfigError if a standby cannot take over with the state and the nodes of the lost head.

    `saved` lists the paths that backups include besides the state. `saved` is None if there are no backups.
    """
    if not state_url.startswith(("postgresql", "postgres")):
        has = f"{state_url.partition(':')[0]} is" if state_url else "the default, a SQLite file in the run folder, is"
        raise ConfigError(
            f"{where}: metadata.raytide.standby needs state in PostgreSQL; {has} on the disk of one machine, "
            "is lost with it, and cannot keep a former head from writing.",
            hint="Set metadata.raytide.state_url to postgresql://user@host/database, or remove standby.",
        )
    if saved is not None and section.shared_dir not in saved:
        raise ConfigError(
            f"{where}: backups would lack tokens and purchases, which are in metadata.raytide.standby.shared_dir.",
            hint=f"Add {section.shared_dir} to metadata.raytide.backup.paths.",
        )
    if provider == "kuberay":
        raise ConfigError(
            f"{where}: provider kuberay has no use for metadata.raytide.standby: Kubernetes restarts the head's pod, "
            "and its service keeps the address.",
            hint="Set gcsFaultToleranceOptions of the RayCluster, and remove standby.",
        )
