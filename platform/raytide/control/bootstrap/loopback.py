"""Which 127.0.K.* a cluster owns. Linux answers on all of 127/8, so clusters on one machine never share an address."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping

from raytide.core.errors import ConflictError

FIRST_K, LAST_K = 2, 250


ANY = "0.0.0.0"  # nothing is bound to it  # nosec B104
"""In a probe: no address of the machine has a listener on the port."""


def claim(needs: Mapping[int, Iterable[tuple[str, int]]]) -> tuple[int, socket.socket]:
    """The first K whose needed addresses and ports are all free, and the claim on it: a socket for the cluster.

    The claim is a name in Linux's abstract socket namespace: it has the same scope as 127.0.K.1, and is gone with the
    last process that holds it. ConflictError when no K can be had.
    """
    taken: list[str] = []
    for k, places in needs.items():
        claimed = _claim(k)
        if claimed is None:
            taken.append(f"127.0.{k}.* is another cluster's")
            continue
        busy = next(((ip, port) for ip, port in places if not is_free(ip, port)), None)
        if busy is None:
            return k, claimed
        claimed.close()
        taken.append(f"port {busy[1]} is in use on {'this machine' if busy[0] == ANY else busy[0]}")
    raise ConflictError(
        f"no address for a cluster: {taken[-1]}" + (f" (and so on, {len(taken)} tried)." if len(taken) > 1 else "."),
        hint="End what listens there (`ss -ltnp` shows it), or a cluster you do not need (`raytide down --name NAME`).",
    )


def is_free(ip: str, port: int) -> bool:
    """Whether nothing listens there; connections that are only closing do not count."""
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
