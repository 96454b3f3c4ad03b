"""A reverse proxy that consists of two ASGI processes. It passes bytes on and does nothing else. `data_planes.py`
compares this proxy with the other sides.

python benchmarks/gateway/thin_plane.py PORT URL [URL ...]
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

HOST, PROCESSES = "127.0.0.1", 2
_OF_ONE_CONNECTION = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


def app(servers: list[str]) -> Starlette:
    in_flight = dict.fromkeys(servers, 0)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            app.state.session = session
            yield

    async def passed_on(request: Request) -> Response:
        body = await request.body()
        headers = {name: value for name, value in request.headers.items() if name not in _OF_ONE_CONNECTION}
        for server in sorted(servers, key=lambda each: in_flight[each]):
            in_flight[server] += 1
            try:
                url = f"{server}{request.url.path}"
                answer = await request.app.state.session.request(request.method, url, data=body, headers=headers)
            except aiohttp.ClientError:
                in_flight[server] -= 1
                continue

            async def pieces(server: str = server, answer: aiohttp.ClientResponse = answer) -> AsyncIterator[bytes]:
                try:
                    async for piece in answer.content.iter_any():
                        yield piece
                finally:
                    in_flight[server] -= 1
                    answer.close()

            return StreamingResponse(pieces(), answer.status, media_type=answer.content_type)
        return Response("no server answers\n", 502)

    return Starlette(routes=[Route("/{path:path}", passed_on, methods=["GET", "POST"])], lifespan=lifespan)


def main() -> None:
    port, *servers = sys.argv[1:]
    for _ in range(PROCESSES - 1):
        if os.fork() == 0:
            break
    listening = socket.create_server((HOST, int(port)), reuse_port=True, backlog=2048)
    uvicorn.Server(uvicorn.Config(app(servers), log_level="error")).run([listening])


if __name__ == "__main__":
    main()
