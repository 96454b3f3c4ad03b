"""Images by URL: from listed hosts with public addresses, whole, soon, and from where their name was checked."""

from __future__ import annotations

import asyncio
import datetime as dt
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from raytide.actors.engine.limits import MAX_IMAGE_BYTES
from raytide.actors.serving.openai_api.chat import image_fetcher
from raytide.actors.serving.openai_api.chat.image_fetcher import ImageBudget, ImageFetcher, is_public
from raytide.actors.serving.openai_api.errors import ApiError
from raytide.core.errors import ConfigError
from raytide.core.objects.endpoint import ServeSpec

FILE = b"\x89PNG of a tide"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(FILE), FILE)
WHERE = "messages[0].content[1]"


@asynccontextmanager
async def site(answer: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Yields the port of a server that answers all requests with these bytes, and the heads that it gets."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        writer.write_eof() if writer.can_write_eof() else writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield server.sockets[0].getsockname()[1], heads


def fetcher(*hosts: str, addresses: Sequence[str] = ("127.0.0.1",), checks: bool = False) -> ImageFetcher:
    """Returns one whose names all have these addresses, which are only judged with `checks`."""

    async def resolve(host: str, port: int) -> Sequence[str]:
        return addresses

    return ImageFetcher(hosts, resolve, is_public if checks else lambda address: True)


async def why_not(fetching: ImageFetcher, url: str) -> str:
    with pytest.raises(ApiError) as caught:
        await fetching.fetch(WHERE, url, ImageBudget())
    error = caught.value.body.error
    assert (caught.value.status, error.param) == (400, WHERE)
    return error.message.removeprefix(f"{WHERE}: ").removesuffix(".")


async def test_a_listed_host_s_image_is_fetched_from_the_address_that_was_checked() -> None:
    async with site(OK) as (port, heads):
        name = f"images.example:{port}"
        assert await fetcher(name).fetch(WHERE, f"http://{name}/a.png?size=2#part", ImageBudget()) == FILE
        assert (
            await fetcher(f"*.example:{port}").fetch(WHERE, f"http://IMAGES.example:{port}/a.png", ImageBudget())
            == FILE
        )
    assert heads[0].startswith(b"GET /a.png?size=2 HTTP/1.1\r\n")
    assert f"host: {name}\r\n".encode() in heads[0].lower()
    assert b"cookie" not in heads[0].lower() and b"authorization" not in heads[0].lower()


async def test_the_images_of_a_request_share_its_bytes() -> None:
    async with site(OK) as (port, _):
        found, url, budget = fetcher(f"images.example:{port}"), f"http://images.example:{port}/", ImageBudget(20)
        assert await found.fetch(WHERE, url, budget) == FILE
        with pytest.raises(ApiError, match="the images of a request have more than 20 bytes"):
            await found.fetch(WHERE, url, budget)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://other.example/a.png", "this endpoint fetches no images from other.example"),
        ("https://images.example.evil.test/a.png", "this endpoint fetches no images from images.example.evil.test"),
        ("https://images.example:8443/a.png", "this endpoint fetches no images from images.example:8443"),
        ("https://example/a.png", "this endpoint fetches no images from example"),
        ("https://images.example@127.0.0.1/a.png", "a URL with a user's name is not read"),
        ("file:///etc/passwd", "only data, https and http URLs are read"),
        ("ftp://images.example/a.png", "only data, https and http URLs are read"),
        ("https:///a.png", "only data, https and http URLs are read"),
        ("https://images.example:99999/a.png", "the URL is not valid"),
        ("https://[::1/a.png", "the URL is not valid"),
        ("https://127.0.0.1/a.png", "this endpoint fetches no images from 127.0.0.1"),
    ],
)
async def test_other_places_are_refused_before_anything_is_asked(url: str, why: str) -> None:
    assert await why_not(fetcher("images.example", "*.below.example"), url) == why


@pytest.mark.parametrize(
    "url",
    ["https://images.example/\u0001", f"https://images.example/{'a' * 70_000}", "https://ä.below.example/a.png"],
    ids=["control", "long", "host"],
)
async def test_a_url_that_cannot_be_sent_is_refused(url: str) -> None:
    assert await why_not(fetcher("images.example", "*.below.example"), url) == "the URL is not valid"


async def test_a_name_that_idna_cannot_write_is_not_found() -> None:
    name = f"{'ä' * 70}.below.example"
    assert await why_not(ImageFetcher(["*.below.example"]), f"https://{name}/a.png") == f"{name} was not found"


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "10.1.2.3",
            "192.168.0.1",
            "172.16.9.9",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "224.0.0.1",
        ),
        *("::1", "::", "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a00:1"),
        *("2002:a00:1::", "2001:0:1::1", "ff02::1"),
    ],
)
async def test_a_name_that_leads_inside_is_refused(address: str) -> None:
    assert not is_public(address)
    found = fetcher("images.example", addresses=["1.1.1.1", address], checks=True)
    assert await why_not(found, "https://images.example/a.png") == "images.example has no public address"


def test_addresses_of_the_internet_are_public() -> None:
    assert all(map(is_public, ("1.1.1.1", "8.8.8.8", "2606:4700::1111", "::ffff:1.1.1.1")))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (
            b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1/\r\ncontent-length: 0\r\n\r\n",
            "images.example answered 302",
        ),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "images.example answered 404"),
        (
            b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (MAX_IMAGE_BYTES + 1),
            f"the images of a request have more than {MAX_IMAGE_BYTES} bytes",
        ),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nx", "images.example broke off (RemoteProtocolError)"),
        (b"no HTTP at all\r\n\r\n", "images.example does not answer (RemoteProtocolError)"),
    ],
)
async def test_what_is_no_whole_image_of_that_place_is_refused(answer: bytes, why: str) -> None:
    async with site(answer) as (port, _):
        assert await why_not(fetcher(f"images.example:{port}"), f"http://images.example:{port}/") == why


async def test_a_host_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_fetcher, "_FETCH_S", 0.2)
    async with site(b"HTTP/1.1 200 OK\r\ncontent-len") as (port, _):
        silent = await why_not(fetcher(f"images.example:{port}"), f"http://images.example:{port}/")
    assert "images.example" in silent

    async def hangs(host: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return ()

    slow = ImageFetcher(("images.example",), hangs)
    assert await why_not(slow, "https://images.example/") == "images.example took longer than 0 s"


async def test_a_certificate_of_another_name_is_refused(tmp_path: Path) -> None:
    async with site(OK, tls=self_signed("other.example", tmp_path)) as (port, heads):
        why = await why_not(fetcher(f"images.example:{port}"), f"https://images.example:{port}/a.png")
    assert (why, heads) == ("images.example does not answer (ConnectError)", [])


@pytest.mark.parametrize("host", ["https://images.example", "images.example/", "*", "a b", "Images.example", "*.*.x"])
def test_a_spec_lists_names_of_hosts_and_nothing_else(host: str) -> None:
    spec = {"name": "m", "model": "/models/m", "image_hosts": ["images.example:8443", "*.example"]}
    assert ServeSpec.parse(spec, where="spec").image_hosts == ("images.example:8443", "*.example")
    with pytest.raises(ConfigError, match="image_hosts"):
        ServeSpec.parse(spec | {"image_hosts": [host]}, where="spec")


def self_signed(name: str, folder: Path) -> ssl.SSLContext:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    until = now + dt.timedelta(days=1)
    number = x509.random_serial_number()
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), number, now, until)
    names = x509.SubjectAlternativeName([x509.DNSName(name)])
    certificate = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
    pem, private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "key.pem").write_bytes(key.private_bytes(pem, private, serialization.NoEncryption()))
    (folder / "cert.pem").write_bytes(certificate.public_bytes(pem))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context
