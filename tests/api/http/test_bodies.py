"""Bodies larger than what a socket gives at once: every byte arrives, in its place, and none of the next request."""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import AsyncIterator, Sequence

import anyio
import anyio.abc
import httpx
import pytest

from staged_pool.api.http.protocol.bodies import INLINE_JOIN_BYTES
from tests.servers.byte_client import EMBED, post, read_answer, statuses
from tests.servers.on_socket import serving
from tests.support.cards import BOTH_LANES
from tests.support.model import LetterModel
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("servers_may_import")]

SIZES = (400_000, INLINE_JOIN_BYTES, INLINE_JOIN_BYTES + 1, 3 * INLINE_JOIN_BYTES + 12_345)


def keeping(files: list[bytes]) -> LetterModel:
    """Return a model that adds each image file to `files`, and reads it as "a"."""

    def read(file: bytes) -> str:
        files.append(file)
        return "a"

    return LetterModel(BOTH_LANES, read_image=read)


def file_of(body_bytes: int) -> bytes:
    return random.Random(body_bytes).randbytes(body_bytes * 3 // 4)


def request_of(file: bytes) -> bytes:
    return json.dumps({"input": [{"image": base64.b64encode(file).decode()}]}).encode()


# Over a socket


async def send_in_parts(stream: anyio.abc.SocketStream, data: bytes, cuts: Sequence[int]) -> None:
    for start, end in zip((0, *cuts), (*cuts, len(data)), strict=True):
        await stream.send(data[start:end])
        await anyio.wait_all_tasks_blocked()


@pytest.mark.parametrize("size", SIZES)
async def test_every_byte_of_an_image_arrives_and_the_connection_goes_on(size: int) -> None:
    files: list[bytes] = []
    file = file_of(size)
    request = post(request_of(file))
    async with serving(keeping(files)) as served, await served.connect() as stream:
        for cuts in ((), (60,), (300, 70_000, size - 1)):
            await send_in_parts(stream, request, cuts)
            assert statuses(await read_answer(stream)) == [200]
            assert files.pop() == file
            await stream.send(EMBED)
            assert statuses(await read_answer(stream)) == [200]


async def test_requests_that_come_on_the_heels_of_a_large_body_are_answered_in_turn() -> None:
    files: list[bytes] = []
    file = file_of(600_000)
    async with serving(keeping(files)) as served, await served.connect() as stream:
        async with anyio.create_task_group() as sending:
            sending.start_soon(stream.send, post(request_of(file)) * 3 + EMBED)
            answers = b""
            with anyio.fail_after(30):
                while len(re.findall(rb"HTTP/1.1 200 ", answers)) < 4 or not answers.endswith(b"}"):
                    answers += await stream.receive()
    assert statuses(answers) == [200] * 4
    assert files == [file] * 3


async def test_a_client_that_leaves_in_the_middle_of_a_large_body_leaves_nothing_behind() -> None:
    files: list[bytes] = []
    request = post(request_of(file_of(600_000)))
    async with serving(keeping(files)) as served:
        for sent in (100, 200_000, len(request) - 1):
            async with await served.connect() as stream:
                await stream.send(request[:sent])
                await until(lambda: served.server.state.connections == 1)
            await until(lambda: served.server.state.connections == 0)
        assert served.server.state.requests == 0
        assert served.server.state.body_bytes == 0
        assert not files
        await served.assert_alive()


async def test_a_large_body_that_stops_coming_is_answered_408_and_others_are_served_meanwhile() -> None:
    async with (
        serving(keeping([]), body_timeout_s=0.2) as served,
        await served.connect() as stream,
    ):
        await stream.send(post(request_of(file_of(600_000)))[:300_000])
        await served.assert_alive()
        assert statuses(await read_answer(stream)) == [408]


@pytest.mark.parametrize("size", [400_000, 2_000_000])
async def test_every_byte_arrives_over_http2_and_in_chunks_too(size: int) -> None:
    files: list[bytes] = []
    file = file_of(size)
    body = request_of(file)

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 100_000):
            yield body[start : start + 100_000]

    async with serving(keeping(files)) as served:
        json_type = {"content-type": "application/json"}
        async with served.client() as client:
            assert (await client.post("/v1/embeddings", content=chunks(), headers=json_type)).status_code == 200
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{served.port}", http1=False, http2=True, timeout=30
        ) as client:
            assert (await client.post("/v1/embeddings", content=body, headers=json_type)).status_code == 200
    assert files == [file, file]
