"""Streams straight from the replicas of an endpoint, as a gateway on a machine of its own has them: `python -m
tests.soak.direct_streams GCS_ADDRESS ENDPOINT`. It prints a line for each stream, until its input ends."""

from __future__ import annotations

import asyncio
import sys
import time

from raytide.actors.engine.backends.remote.client import RemoteEngine
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.types import GenRequest
from raytide.core.ray_internals import gcs_client
from raytide.gateway.replicas.directory import _read, listing

STREAMS, TOKENS = 4, 900


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def stream(engine: RemoteEngine, lane: int, number: int) -> str:
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=lane, ignore_eos=True)
    prompt = f"def function_{lane}("
    request = GenRequest(request_id=f"lane-{lane}-{number}", prompt=prompt, sampling=sampling)
    text = ""
    async for chunk in engine.generate(request):
        text += chunk.text
    return text


async def work(engine: RemoteEngine, lane: int, over: asyncio.Event) -> None:
    expected, number = "", 0
    while not over.is_set():
        began_s = time.monotonic()
        try:
            text = await stream(engine, lane, number)
            outcome = "whole" if text == (expected or text) else "differs"
            expected = expected or text
        except Exception as error:
            outcome = f"broken: {error!r}"
            await asyncio.sleep(1.0)
        say(f"{time.monotonic() - began_s:.1f} {outcome}")
        number += 1


async def main(gcs_address: str, endpoint: str) -> None:
    (address,) = listing(_read(gcs_client(gcs_address)))[endpoint].replicas.values()
    engine = RemoteEngine(address.host, address.port, address.secret, name="direct")
    await engine.start()
    over = asyncio.Event()
    lanes = [asyncio.create_task(work(engine, lane, over)) for lane in range(STREAMS)]
    await asyncio.to_thread(sys.stdin.read)
    over.set()
    await asyncio.gather(*lanes)
    await engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
