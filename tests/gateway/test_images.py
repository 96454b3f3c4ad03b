"""Images in chats, through the gateway, by the official client."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from tests.actors.engine.model.vision.llava import PATCH, SIZE, data_url, picture, save_llava
from tests.actors.serving.openai_api.chat.test_image_fetcher import site
from tests.gateway.conftest import Gateway, running_gateway

from raytide.actors.engine import EngineConfig, FakeEngine, NativeEngine
from raytide.actors.serving.openai_api.admission import CALLER
from raytide.actors.serving.openai_api.chat import image_fetcher
from raytide.core.objects.api_key import HostedBackend
from raytide.gateway.hosted import HostedApis

TOKENS = (SIZE // PATCH) ** 2
ONE, OTHER = picture(1), picture(2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    save_llava(folder)
    return folder


@asynccontextmanager
async def serving(model: Path, **spec: object) -> AsyncIterator[tuple[Gateway, AsyncOpenAI]]:
    async with running_gateway() as gateway:
        config = EngineConfig(model_dir=str(model), device="cpu", num_blocks=64, block_size=8, max_running=4)
        await gateway.deploy("sees", NativeEngine(config), **spec)
        yield gateway, client_of(gateway)


def client_of(gateway: Gateway) -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://gateway/v1", api_key="none", max_retries=0, http_client=gateway.http)


def asked(*images: bytes, text: str = "what is this?") -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": data_url(each)}} for each in images]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    return {"messages": messages, "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.mark.asyncio
async def test_a_chat_with_images_is_answered_and_its_image_tokens_are_counted(tiny: Path) -> None:
    async with serving(tiny) as (_, client):
        ask = client.chat.completions.create
        plain, one, other, both = [
            await ask(model="sees", **asked(*images)) for images in ((), (ONE,), (OTHER,), (ONE, OTHER))
        ]
        again = await ask(model="sees", **asked(ONE, text="what is this? "))
        streamed = [each async for each in await ask(model="sees", stream=True, **asked(ONE))]
    texts = [answer.choices[0].message.content for answer in (plain, one, other, both)]
    assert len(set(texts)) == 4
    assert "".join(each.choices[0].delta.content or "" for each in streamed) == texts[1]
    usages = [answer.usage for answer in (plain, one, other, both, again)]
    counts = [usage.prompt_tokens for usage in usages if usage is not None]
    assert counts[3] - counts[1] == TOKENS + 1  # the template's line break
    assert counts[1] - counts[0] > TOKENS
    assert counts[2] == counts[1]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages if usage and usage.prompt_tokens_details]
    assert cached[2] == 0 < TOKENS // 8 * 8 <= cached[4]


@pytest.mark.asyncio
async def test_a_message_reads_the_images_that_a_chat_does(tiny: Path) -> None:
    def asked_as_message(image: bytes) -> Any:
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(image).decode()}
        blocks = [{"type": "image", "source": source}, {"type": "text", "text": "what is this?"}]
        return {"model": "sees", "messages": [{"role": "user", "content": blocks}]}

    async with serving(tiny) as (gateway, client):
        chat = await client.chat.completions.create(model="sees", **asked(ONE))
        body = {**asked_as_message(ONE), "max_tokens": 8, "temperature": 0}
        answer = await gateway.http.post("/v1/messages", json=body)
        counted = await gateway.http.post("/v1/messages/count_tokens", json=asked_as_message(OTHER))
    message, usage = answer.json(), chat.usage
    assert usage is not None and counted.json() == {"input_tokens": usage.prompt_tokens}
    read = message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]
    assert read == usage.prompt_tokens
    written = "".join(block["text"] for block in message["content"])
    assert (chat.choices[0].message.content or "").startswith(written)


@pytest.mark.asyncio
async def test_a_response_reads_the_images_that_a_chat_does(tiny: Path) -> None:
    def ask(image: bytes) -> Any:
        part = {"type": "input_image", "image_url": data_url(image), "detail": "auto"}
        return [{"role": "user", "content": [part, {"type": "input_text", "text": "what is this?"}]}]

    async with serving(tiny) as (_, client):
        one, other = [
            await client.responses.create(model="sees", input=ask(image), max_output_tokens=8, temperature=0)
            for image in (ONE, OTHER)
        ]
        chat = await client.chat.completions.create(model="sees", **asked(ONE) | {"extra_body": {}})
        with pytest.raises(openai.BadRequestError, match="data URLs only"):
            await client.responses.create(
                model="sees",
                input=[{"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc/passwd"}]}],  # type: ignore[typeddict-item]
            )
    assert one.output_text == chat.choices[0].message.content != other.output_text
    assert one.usage is not None and chat.usage is not None
    assert one.usage.input_tokens == chat.usage.prompt_tokens > TOKENS


@pytest.mark.asyncio
async def test_equal_prompts_with_other_images_share_no_answer(tiny: Path) -> None:
    async with serving(tiny) as (_, client):
        asking = (client.chat.completions.create(model="sees", **asked(image)) for image in (ONE, OTHER, ONE))
        one, other, same = [answer.choices[0].message.content for answer in await asyncio.gather(*asking)]
    assert one == same != other


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://example.com/a.png", "data URLs only"),
        ("http://169.254.169.254/latest/meta-data", "data URLs only"),
        ("file:///etc/passwd", "data URLs only"),
        ("data:text/html;base64,AAAA", "data URLs only"),
        ("data:image/png;base64,@@@", "not valid base64"),
        (data_url(b"no image"), "image 0 cannot be read"),
    ],
)
async def test_what_is_no_image_is_refused_and_nothing_is_fetched(tiny: Path, url: str, said: str) -> None:
    async with serving(tiny) as (_, client):
        messages: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        with pytest.raises(openai.BadRequestError, match=said):
            await client.chat.completions.create(model="sees", messages=messages)
        many = asked(*[ONE] * 17)
        with pytest.raises(openai.BadRequestError, match="17 images; at most 16"):
            await client.chat.completions.create(model="sees", **many)
        system: Any = [{**asked(ONE)["messages"][0], "role": "system"}]
        with pytest.raises(openai.BadRequestError, match="an image is a user's"):
            await client.chat.completions.create(model="sees", messages=system)


@pytest.mark.asyncio
async def test_an_image_of_an_allowed_host_is_the_image_of_its_file(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def here(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    monkeypatch.setattr(image_fetcher, "_addresses", here)
    async with site(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(ONE), ONE)) as (port, _):
        host = f"images.example:{port}"
        async with serving(tiny, image_hosts=(host,)) as (_, client):
            url = {"type": "image_url", "image_url": {"url": f"http://{host}/one.png"}}
            by_url = asked()
            by_url["messages"][0]["content"].insert(0, url)
            with pytest.raises(openai.BadRequestError, match=r"content\[0\]: images.example has no public address"):
                await client.chat.completions.create(model="sees", **by_url)
            monkeypatch.setattr(image_fetcher, "is_public", lambda address: True)
        async with serving(tiny, image_hosts=(host,)) as (_, client):
            fetched = await client.chat.completions.create(model="sees", **by_url)
            sent = await client.chat.completions.create(model="sees", **asked(ONE))
            assert fetched.choices[0].message.content == sent.choices[0].message.content
            url["image_url"] = {"url": "https://elsewhere.example/one.png"}
            with pytest.raises(openai.BadRequestError, match=r"fetches no images from elsewhere\.example"):
                await client.chat.completions.create(model="sees", **by_url)


@pytest.mark.asyncio
async def test_a_model_without_images_refuses_them_by_name() -> None:
    async with running_gateway() as gateway:
        await gateway.deploy("blind", FakeEngine())
        with pytest.raises(openai.BadRequestError) as caught:
            await client_of(gateway).chat.completions.create(model="blind", **asked(ONE))
    assert caught.value.param == "messages[0].content[0]"
    assert "reads text parts only, not 'image_url'" in str(caught.value)


@pytest.mark.parametrize("image", [{"url": data_url(ONE * 100)}, data_url(ONE * 100)], ids=["object", "string"])
async def test_a_hosted_models_images_count_by_number_and_not_by_the_bytes_of_their_files(image: object) -> None:
    text = {"type": "text", "text": "data:image/png;base64," + "x" * 4000}
    parts = [{"type": "image_url", "image_url": image}, text, {"type": "image_url", "image_url": image}]
    schema = {"default": {"url": "data:image/png;base64," + "x" * 5000}}  # a model reads it as text
    tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    body = {"model": "sees", "messages": [{"role": "user", "content": parts}], "tools": tools, "stream": True}
    caller, request = AsyncMock(), AsyncMock()
    caller.admit.return_value = MagicMock(id="")
    request.url.path, request.scope, request.json.return_value = "/v1/chat/completions", {CALLER: caller}, body
    request.headers = {}
    backend = HostedBackend.model_validate({"base_url": "http://far/v1", "model": "big", "max_tokens": 5})
    apis = HostedApis({"http://far/v1": ""}, httpx.MockTransport(lambda _: httpx.Response(200)))
    answer: Any = await apis.answer(backend, "sees", request, MagicMock())
    most = caller.admit.await_args.args[1]
    assert 12_000 < most < 12_600, "3,000 tokens of images, and the characters of the rest"
    assert answer._reader.usage.prompt_tokens == 3000 + (most - 3000) // 4
    await apis.close()
