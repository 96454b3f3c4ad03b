"""Starts the member processes of a group, except for the leader."""

from __future__ import annotations

import json
import os
import subprocess  # nosec B404
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_END_TIMEOUT_S = 5.0
NATIVE_MEMBER = "raytide.actors.engine.model.parallel.member"
"""The module that a member of the native engine runs."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """The address at which the leader of a group of `size` members waits for the other members, and the group's secret.
    Members of the native engine authenticate with the secret. Members of vLLM use it as their random seed.
    """

    host: str
    port: int
    secret: str
    size: int


class LocalMembers:
    """Starts members of a group as processes of this machine. Each process runs `module`, and gets the invitation and
    `options` as JSON on its stdin.

    `ranks` are the members to start here, and `local_size` counts all members on this machine. `host` is this machine's
    address. `model_dir` is the path of the model here, if it differs from the leader's. `invite` sends the invitation
    to other machines.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        local_size: int,
        host: str = "127.0.0.1",
        threads: int = 1,
        model_dir: str = "",
        module: str = NATIVE_MEMBER,
        options: Mapping[str, Any] | None = None,
        invite: Callable[[Invitation], None] | None = None,
    ) -> None:
        self.host, self.local_size, self._invite = host, local_size, invite
        self._ranks, self._threads, self._model_dir = ranks, threads, model_dir
        self._module, self._options = module, options or {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def launch(self, invitation: Invitation) -> None:
        """Starts the members, which then connect to the leader."""
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads), "MKL_NUM_THREADS": str(self._threads)}
        for rank in self._ranks:
            process = subprocess.Popen(  # nosec B603
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                env=environment,
            )
            self._processes[rank] = process
            order = {
                **asdict(invitation),
                "rank": rank,
                "local_rank": rank % self.local_size,
                "own_host": self.host,
                "model_dir": self._model_dir,
                **self._options,
            }
            assert process.stdin is not None
            # It stays open: its end tells the member that this process has gone.
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
        if self._invite is not None:
            self._invite(invitation)

    def problem(self) -> str | None:
        """Returns a message if a member has ended, otherwise None. The message contains the member's rank and exit
        code.
        """
        for rank, process in self._processes.items():
            if (code := process.poll()) is not None:
                return f"member {rank} ended with code {code}"
        return None

    def stop(self) -> None:
        """Ends the members that still run, and waits for their end."""
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes.values():
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
