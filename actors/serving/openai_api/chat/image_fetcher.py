"""Fetches the images to which requests link by URL. Only hosts that the endpoint allows are contacted.

A host's name is resolved once, and all addresses of the host must be public. The connection goes to one of the
checked addresses. A request therefore cannot reach an internal address, even if the name resolves to another address
after the check. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from raytide.actors.engine.limits import MAX_IMAGE_BYTES
from raytide.actors.serving.openai_api.errors import ApiError, invalid

if TYPE_CHECKING:
    import httpx

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

_FETCH_S = 10.0
"""The time for one image, from the name's resolution to its last byte."""
_MOST_AT_ONCE = 16
_PORTS = {"http": 80, "https": 443}
_TRANSLATED = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))
"""The IPv6 networks of NAT64, in which an address may stand for any IPv4 address."""


class ImageBudget:
    """The number of bytes that may still be fetched for one request. It is limited because all images of a request are
    in memory at once.
    """

    def __init__(self, most_bytes: int = MAX_IMAGE_BYTES) -> None:
        self._most_bytes = self._left = most_bytes

    def take(self, where: str, count: int) -> None:
        """Subtracts `count` bytes. Raises ApiError if fewer than `count` bytes are left."""
        self._left -= count
        if self._left < 0:
            raise _refused(where, f"the images of a request have more than {self._most_bytes} bytes")


class ImageFetcher:
    """Fetches images from the listed `hosts`.

    An entry is `NAME`, or `*.NAME` for all names below NAME. Either form can end with `:PORT`. Use a fetcher from one
    event loop only. `resolve` and `is_allowed` exist for tests.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        resolve: Resolve | None = None,
        is_allowed: Callable[[str], bool] | None = None,
    ) -> None:
        self.hosts = tuple(hosts)
        self._resolve, self._is_allowed = resolve or _addresses, is_allowed or is_public
        self._places = asyncio.Semaphore(_MOST_AT_ONCE)
        self._client: httpx.AsyncClient | None = None

    async def fetch(self, where: str, url: str, budget: ImageBudget) -> bytes:
        """Returns the content of the file at a URL.

        Raises ApiError if the URL is not allowed, if its host is not found or does not answer with status 200, if the
        file takes too long, or if the file is larger than the rest of `budget`. The error names `where`, the place of
        the image in the request.
        """
        parts = self._checked(where, url)
        host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        try:
            async with asyncio.timeout(_FETCH_S), self._places:
                addresses = await self._resolve(host, port)
                if not addresses or not all(map(self._is_allowed, addresses)):
                    raise _refused(where, f"{host} has no public address")
                return await self._download(where, parts, addresses[0], port, budget)
        except TimeoutError:
            raise _refused(where, f"{host} took longer than {_FETCH_S:.0f} s") from None
        except (OSError, UnicodeError):  # the latter from IDNA, which cannot write some names
            raise _refused(where, f"{host} was not found") from None

    def _checked(self, where: str, url: str) -> SplitResult:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise _refused(where, "the URL is not valid") from None
        if parts.scheme not in _PORTS or not parts.hostname:
            raise _refused(where, "only data, https and http URLs are read")
        if parts.username is not None or parts.password is not None:
            raise _refused(where, "a URL with a user's name is not read")
        if not self._is_listed(parts.hostname, port):
            raise _refused(where, f"this endpoint fetches no images from {parts.netloc}")
        return parts

    def _is_listed(self, host: str, port: int | None) -> bool:
        for entry in self.hosts:
            name, _, own_port = entry.partition(":")
            is_name = host.endswith(name[1:]) if name.startswith("*.") else host == name
            if is_name and port == (int(own_port) if own_port else None):
                return True
        return False

    async def _download(self, where: str, parts: SplitResult, address: str, port: int, budget: ImageBudget) -> bytes:
        import httpx

        if self._client is None:
            unused = httpx.Limits(max_keepalive_connections=0)  # no connection stays open, so there is nothing to close
            self._client = httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=_FETCH_S, limits=unused)
        literal = f"[{address}]" if ":" in address else address
        host = parts.hostname or ""
        headers = {"host": parts.netloc, "accept": "image/*", "accept-encoding": "identity"}
        try:
            target = httpx.URL(parts._replace(netloc=f"{literal}:{port}", fragment="").geturl())
            request = self._client.build_request("GET", target, headers=headers, extensions={"sni_hostname": host})
        except (httpx.InvalidURL, UnicodeError):
            raise _refused(where, "the URL is not valid") from None
        try:
            answer = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise _refused(where, f"{host} does not answer ({type(error).__name__})") from None
        try:
            if answer.status_code != 200:
                raise _refused(where, f"{host} answered {answer.status_code}")
            found = bytearray()
            async for part in answer.aiter_raw():
                budget.take(where, len(part))
                found += part
            return bytes(found)
        except httpx.HTTPError as error:
            raise _refused(where, f"{host} broke off ({type(error).__name__})") from None
        finally:
            await answer.aclose()


def is_public(address: str) -> bool:
    """Returns whether an address is public. Addresses that embed an IPv4 address for translation, such as NAT64 and
    6to4, count as not public.
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        elif found.sixtofour or found.teredo or any(found in network for network in _TRANSLATED):
            return False
    return found.is_global and not found.is_multicast


async def _addresses(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]


def _refused(where: str, why: str) -> ApiError:
    return invalid(f"{where}: {why}.", param=where)
