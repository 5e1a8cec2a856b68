"""Sources of GeoTIFFs on hosts, in files and in base64, under the server's rules."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import anyio
import pytest

from geo_segmentation.request import SegmentationRequest, parse_request
from geo_segmentation.sources import Sources
from staged_pool import Image, InvalidInput, MediaTimedOut, MediaUnavailable, TooLarge, UnusableMedia, UrlNotAllowed
from staged_pool.runtime.media.fetcher import MediaFetcher
from tests.runtime.media.origin import answer, fetcher, origin, redirect
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


def sources(max_bytes: int = 1000, **settings: Any) -> Sources:
    media: MediaFetcher = fetcher(max_image_bytes=max_bytes, **settings)

    async def fetch(url: str) -> bytes:
        source = (await media.fetch(Image(url))).source
        assert isinstance(source, bytes)
        return source

    return Sources(fetch, max_bytes)


def request(*urls: str, **fields: str) -> SegmentationRequest:
    return parse_request({"data": list(urls), **fields})


async def test_files_come_in_the_order_of_the_request() -> None:
    async with origin() as host:
        later = anyio.Event()

        async def first(stream: Any) -> None:
            await later.wait()
            await answer(b"first")(stream)

        async def second(stream: Any) -> None:
            later.set()
            await answer(b"second")(stream)

        host.pages = {"/1": first, "/2": second}
        assert await sources().get(request(host.url("/1"), host.url("/2"))) == (b"first", b"second")


async def test_a_path_is_a_file_of_the_folder_that_is_open(tmp_path: Path) -> None:
    folder = tmp_path / "open folder"
    await anyio.Path(folder).mkdir()
    await anyio.Path(folder / "a.tif").write_bytes(b"a file")
    await anyio.Path(tmp_path / "b.tif").write_bytes(b"another")
    opened = sources(allow_media_path=str(folder))
    assert await opened.get(request(str(folder / "a.tif"), data_format="path")) == (b"a file",)
    for outside in (tmp_path / "b.tif", folder / ".." / "b.tif"):
        with pytest.raises(UrlNotAllowed, match="outside of the folder"):
            await opened.get(request(str(outside), data_format="path"))
    with pytest.raises(UrlNotAllowed, match="this server reads no files"):
        await sources().get(request(str(folder / "a.tif"), data_format="path"))


async def test_base64_is_decoded_and_measured() -> None:
    text = base64.b64encode(bytes(1000)).decode()
    assert await sources().get(request(text, data_format="b64_json")) == (bytes(1000),)
    with pytest.raises(TooLarge, match=r"data.data\[0\] is larger than this server's limit of 990 bytes"):
        await sources(990).get(request(text, data_format="b64_json"))
    with pytest.raises(InvalidInput, match=r"data.data\[0\] is no base64"):
        await sources().get(request("%%%%", data_format="b64_json"))


@pytest.mark.parametrize(
    ("url", "kind", "says"),
    [
        ("http://169.254.169.254/latest", UrlNotAllowed, "leads to a host that this server does not fetch from"),
        ("http://10.0.0.1/a.tif", UrlNotAllowed, "leads to a host that this server does not fetch from"),
        ("ftp://images.example/a.tif", UrlNotAllowed, "is not one of http, https or file"),
        ("/vsicurl/http://images.example/a.tif", UrlNotAllowed, "is not one of http, https or file"),
        ("http://nowhere.example/a.tif", MediaUnavailable, "could not be found"),
    ],
)
async def test_a_url_that_is_not_allowed_is_named(url: str, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=rf"data.data\[0\]: .*{says}") as raised:
        await sources().get(request(url))
    if isinstance(raised.value, InvalidInput):
        assert raised.value.param == "data.data[0]"


@pytest.mark.parametrize(
    ("behave", "kind", "says"),
    [
        (answer(b"", status="404 Not Found"), UnusableMedia, "answered with status 404"),
        (answer(b"", status="503 Busy"), MediaUnavailable, "answered with status 503"),
        (answer(bytes(2000)), TooLarge, "limit of 1000 bytes"),
        (redirect("http://127.0.0.2/"), UrlNotAllowed, "leads to a host that this server does not fetch from"),
    ],
)
async def test_a_bad_answer_ends_the_other_fetches(behave: Any, kind: type[Exception], says: str) -> None:
    async with origin() as host:
        asked = anyio.Event()

        async def silent(stream: Any) -> None:
            asked.set()
            await anyio.sleep_forever()

        async def bad(stream: Any) -> None:
            await asked.wait()
            await behave(stream)

        host.pages = {"/silent": silent, "/bad": bad}
        with pytest.raises(kind, match=rf"data.data\[1\]: .*{says}"):
            await sources().get(request(host.url("/silent"), host.url("/bad")))


async def test_a_slow_host_is_named() -> None:
    async with origin() as host:
        host.pages = {"/": lambda stream: anyio.sleep_forever()}
        with pytest.raises(MediaTimedOut, match=r"data.data\[0\]: The host of the image did not send it within 0.2 s"):
            await sources(media_timeout_s=0.2).get(request(host.url("/")))


async def test_a_caller_who_leaves_ends_all_fetches() -> None:
    async with origin() as host:
        asked = 0

        async def silent(stream: Any) -> None:
            nonlocal asked
            asked += 1
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()
            asked -= 1

        host.pages = {"/": silent}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sources().get, request(host.url("/"), host.url("/")))
            await until(lambda: asked == 2)
            tasks.cancel_scope.cancel()
        await until(lambda: asked == 0)
