"""Switches the operator's own machines on and off by configured commands, such as those of Wake-on-LAN or IPMI."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable

from raytide.core.errors import ClusterError, ProviderError
from raytide.core.logs import logger
from raytide.core.objects.hardware.host import Host, HostsSection

_COMMAND_S = 60.0
_RETRY_S = 5.0

log = logger(__name__)


class PowerSwitch:
    """Runs the operator's power commands on the controller's machine, without a shell. A machine without power commands
    is assumed to be always on.
    """

    def __init__(self, hosts: HostsSection) -> None:
        self._hosts = hosts
        self._closed = threading.Event()

    def on(self, host: Host, reach: Callable[[], object], is_given_up: Callable[[], bool]) -> bool:
        """Makes sure that the machine is on. If it cannot be reached, switches it on and waits until it can be reached.
        Returns True at once if the machine has no power command. Returns False if the wait is given up, because
        `is_given_up` returns True or `close` is called.

        `reach` tries to reach the machine and raises ClusterError if that fails. After `power_on_timeout_s` the call
        raises the last error of `reach`. Raises ProviderError if the power command fails.
        """
        argv = self._hosts.power_on_of(host)
        if not argv:
            return True
        deadline = None
        while not (self._closed.is_set() or is_given_up()):
            try:
                reach()
                return True
            except ClusterError:
                if deadline is None:
                    _run(argv, host)
                    deadline = time.monotonic() + self._hosts.power_on_timeout_s
                elif time.monotonic() >= deadline:
                    raise
            self._closed.wait(_RETRY_S)
        return False

    def off(self, host: Host) -> None:
        """Switches the machine off. A failure is only logged, because the machine's node has ended already."""
        if argv := self._hosts.power_off_of(host):
            try:
                _run(argv, host)
            except ProviderError as error:
                log.warning("a host cannot be switched off", extra={"host": host.name, "error": str(error)})

    def close(self) -> None:
        """Stops waiting for machines to switch on."""
        self._closed.set()


def _run(argv: tuple[str, ...], host: Host) -> None:
    what = f"the power command of host {host.name}, {argv[0]},"
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_COMMAND_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProviderError(f"{what} failed: {error}", hint="Correct power_on or power_off of hosts.") from None
    if done.returncode:
        said = (done.stdout.strip().splitlines() or [""])[-1]
        raise ProviderError(
            f"{what} ended with {done.returncode}: {said}", hint="Correct power_on or power_off of hosts."
        )
