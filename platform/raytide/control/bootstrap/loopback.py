"""Claims the addresses 127.0.K.* for a cluster, so that local clusters never share an address. Linux answers on all of
127/8."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping

from raytide.core.errors import ConflictError

FIRST_K, LAST_K = 2, 250


ANY = "0.0.0.0"  # only probed  # nosec B104
"""The address at which a probe looks for a port that is free on all addresses of the machine."""


def claim(needs: Mapping[int, Iterable[tuple[str, int]]]) -> tuple[int, socket.socket]:
    """Returns the first K for which all addresses and ports are free, and the socket that claims this K.

    The socket holds a name in Linux's abstract socket namespace. The name has the same scope as the address
    127.0.K.1. The claim ends with the last process that holds the socket. Raises ConflictError if no K is free.
    """
    taken: list[str] = []
    for k, places in needs.items():
        claimed = _claim(k)
        if claimed is None:
            taken.append(f"127.0.{k}.* belongs to another cluster")
            continue
        busy = next(((ip, port) for ip, port in places if not is_free(ip, port)), None)
        if busy is None:
            return k, claimed
        claimed.close()
        taken.append(f"port {busy[1]} is in use on {'this machine' if busy[0] == ANY else busy[0]}")
    raise ConflictError(
        f"no free address for a cluster: {taken[-1]}"
        + (f" (and so on, {len(taken)} tried)." if len(taken) > 1 else "."),
        hint="End what listens there (`ss -ltnp` shows it), or another cluster (`raytide down --name NAME`).",
    )


def is_free(ip: str, port: int) -> bool:
    """Returns whether nothing listens at this address and port. Connections that are being closed do not count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ip, port))
        except OSError:
            return False
    return True


def is_listening(address: str, *, timeout_s: float = 1.0) -> bool:
    ip, _, port = address.rpartition(":")
    try:
        socket.create_connection((ip, int(port)), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def _claim(k: int) -> socket.socket | None:
    claimed = socket.socket(socket.AF_UNIX)
    try:
        claimed.bind(f"\0raytide-{k}")
    except OSError:
        claimed.close()
        return None
    return claimed
