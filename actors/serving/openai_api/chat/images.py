"""The images of a chat: message parts of the type `image_url`. The URL contains the file itself, or links to the file
on an allowed host.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Sequence

from raytide.actors.engine.limits import MAX_IMAGE_BYTES, MAX_IMAGES
from raytide.actors.serving.openai_api.chat.image_fetcher import ImageBudget, ImageFetcher
from raytide.actors.serving.openai_api.errors import invalid
from raytide.actors.serving.openai_api.wire import ChatMessage

_DATA_URL = re.compile(r"data:image/[a-z.+-]{1,40};base64,", re.IGNORECASE)


def _urls(messages: Sequence[ChatMessage]) -> list[tuple[str, str]]:
    """Returns the place and the URL of each image, in order. Raises ApiError if there are too many."""
    found = [
        (
            f"messages[{index}].content[{place}]",
            part.image_url if isinstance(part.image_url, str) else part.image_url.url,
        )
        for index, message in enumerate(messages)
        if isinstance(message.content, list)
        for place, part in enumerate(message.content)
        if part.type == "image_url" and part.image_url is not None
    ]
    if len(found) > MAX_IMAGES:
        raise invalid(f"messages have {len(found)} images; at most {MAX_IMAGES} are read.", param="messages")
    return found


async def images_of(messages: Sequence[ChatMessage], fetcher: ImageFetcher) -> tuple[bytes, ...]:
    """Returns the files of all images in the messages, in order. The files are not decoded here. Raises ApiError if
    there are too many images. Also raises ApiError if a file cannot be read from its URL. The error then names the
    message part that contains the URL.
    """
    budget = ImageBudget()
    return tuple(await asyncio.gather(*(_read(where, url, fetcher, budget) for where, url in _urls(messages))))


async def _read(where: str, url: str, fetcher: ImageFetcher, budget: ImageBudget) -> bytes:
    head = _DATA_URL.match(url)
    if head is None and fetcher.hosts:
        return await fetcher.fetch(where, url, budget)
    if head is None:
        raise invalid(
            f"{where}: images are read from data URLs only (data:image/png;base64,...), not from other places.",
            param=where,
        )
    if len(url) - head.end() > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise invalid(f"{where}: an image has more than {MAX_IMAGE_BYTES} bytes.", param=where)
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid(f"{where}: the URL is not valid base64: {error}.", param=where) from None
