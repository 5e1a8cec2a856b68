"""Uploads: what arrives is on the disk, whole or not at all, and nothing else is."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from structlog.typing import EventDict

from tests.api.batches.asking import Asking
from tests.servers.byte_client import read_answer, statuses
from tests.servers.on_socket import Served, serving
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("servers_may_import")]

FORM = {"content-type": "multipart/form-data; boundary=edge"}


@asynccontextmanager
async def receiving(folder: Path, **config: Any) -> AsyncIterator[tuple[Served, httpx.AsyncClient]]:
    """A server with a folder; at the end of the block nothing is half there."""
    async with serving(batch_dir=folder, **config) as served, served.client() as client:
        yield served, client
        await until(lambda: not served.server.state.requests)
        assert served.server._batches is not None
        disk = served.server._batches.store.disk.held_bytes
    assert not [*(folder / "uploads").iterdir()]
    files = [path for path in (folder / "files").iterdir() if path.suffix != ".json"]
    assert disk == sum(path.stat().st_size for path in files)
    assert len(files) == len([*(folder / "files").glob("*.json")])


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    """Make one part of a form."""
    file = "" if filename is None else f'; filename="{filename}"'
    return f'--edge\r\ncontent-disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + content + b"\r\n"


def files_in(folder: Path) -> set[str]:
    """Return the paths of all files below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


BATCH = part("purpose", b"batch")
END = b"--edge--\r\n"


def form(content: bytes) -> bytes:
    """Make a form that is right."""
    return BATCH + part("file", content, "a.jsonl") + END


def head(body_bytes: int | None, *headers: str) -> bytes:
    """Make the head of an upload."""
    framing = "transfer-encoding: chunked" if body_bytes is None else f"content-length: {body_bytes}"
    lines = ["POST /v1/files HTTP/1.1", "host: test", f"content-type: {FORM['content-type']}", framing, *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "a\\..\\b", "naïve café 🙂.jsonl", "con", "a;b", "x" * 255, ""]
)
async def test_a_name_is_shown_and_never_a_path(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "inside" / "deep"
    async with receiving(folder) as (_, client):
        body = BATCH + part("file", b"content", name.replace("\\", "\\\\")) + END
        answer = (await client.post("/v1/files", content=body, headers=FORM)).raise_for_status().json()
        assert answer["filename"] == name
        assert answer["bytes"] == 7
        content = await client.get(f"/v1/files/{answer['id']}/content")
        assert content.content == b"content"
        assert content.headers["x-content-type-options"] == "nosniff"
        assert (await client.head(f"/v1/files/{answer['id']}/content")).headers["content-length"] == "7"
    assert files_in(tmp_path) == {f"inside/deep/files/{answer['id']}{end}" for end in (".json", ".content")} | {
        "inside/deep/lock"
    }


@pytest.mark.parametrize("http2", [False, True], ids=["http1", "http2"])
@pytest.mark.parametrize("size", [0, 1, 2**18, 3_000_000])
async def test_every_byte_arrives(tmp_path: Path, size: int, http2: bool) -> None:
    content = bytes(range(256)) * (size // 256) + b"\r\n--edg" * (size % 256)

    async def pieces() -> AsyncIterator[bytes]:
        body = form(content)
        for start in range(0, len(body), 99_991):
            yield body[start : start + 99_991]

    async with receiving(tmp_path) as (served, _):
        async with httpx.AsyncClient(base_url=served.url, http1=not http2, http2=http2, timeout=30) as client:
            for body in (form(content), pieces()):
                answer = await client.post("/v1/files", content=body, headers=FORM)
                file = answer.raise_for_status().json()
                assert file["bytes"] == len(content)
                assert (await client.get(f"/v1/files/{file['id']}/content")).content == content


WRONG: Mapping[str, tuple[bytes, str]] = {
    "another boundary": (form(b"a").replace(b"--edge", b"--other"), "malformed"),
    "no end": (BATCH + part("file", b"a", "a"), "ends before its last boundary"),
    "nothing": (b"", "ends before its last boundary"),
    "no file": (BATCH + END, "file: this part is required"),
    "a file without a name": (BATCH + part("file", b"a" * 2000) + END, "is it a file without a name?"),
    "two files": (BATCH + part("file", b"a", "a") + part("file", b"b", "b") + END, "has one file"),
    "a file elsewhere": (BATCH + part("image", b"a", "a") + END, "has one file"),
    "a field twice": (BATCH + BATCH + part("file", b"a", "a") + END, "in the form twice"),
    "no purpose": (part("file", b"a", "a") + END, "purpose: expected batch"),
    "another purpose": (part("purpose", b"fine-tune") + part("file", b"a", "a") + END, "purpose: expected batch"),
    "a long name": (BATCH + part("file", b"a", "x" * 256) + END, "longer than 255 bytes"),
    "many parts": (b"".join(part(str(n), b"") for n in range(17)) + END, "more than 16 parts"),
    "no UTF-8": (part("purpose", b"\xff") + END, "expected UTF-8"),
    "a part without a name": (b"--edge\r\ncontent-type: a/b\r\n\r\n\r\n" + END, "a part has no name"),
    "a long header": (b"--edge\r\na: " + b"x" * 100_000 + b"\r\n\r\n" + END, "malformed or too long"),
    "a time to keep": (part("expires_after[seconds]", b"7200") + form(b"a"), "expires_after[anchor]"),
    "a short time": (
        part("expires_after[anchor]", b"created_at") + part("expires_after[seconds]", b"9") + form(b"a"),
        "expires_after[seconds]: expected a whole number from 3600",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_wrong_form_is_named_and_leaves_nothing(tmp_path: Path, wrong: str) -> None:
    body, message = WRONG[wrong]
    async with receiving(tmp_path) as (_, client):
        answer = await client.post("/v1/files", content=body, headers=FORM)
        assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True), answer.text
        assert (await client.get("/v1/files")).json()["data"] == []


async def test_a_wrong_head_is_named(tmp_path: Path) -> None:
    async with receiving(tmp_path) as (_, client):
        for headers, code in (
            ({"content-type": "application/json"}, 415),
            ({"content-type": "multipart/form-data"}, 400),
            ({"content-type": f"multipart/form-data; boundary={'x' * 71}"}, 400),
            (FORM | {"content-encoding": "gzip"}, 415),
        ):
            answer = await client.post("/v1/files", content=gzip.compress(form(b"a")), headers=headers)
            assert answer.status_code == code


async def test_a_time_to_keep_is_kept(tmp_path: Path) -> None:
    async with receiving(tmp_path) as (served, client):
        file = await Asking(client).upload(
            b"a", **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        )
        assert file["expires_at"] - file["created_at"] == 3600
        assert served.server._batches is not None
        store = served.server._batches.store
        store.clock = lambda: float(file["expires_at"])
        assert (await client.get(f"/v1/files/{file['id']}")).status_code == 404
        await store.sweep()


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files have at most 100,000 bytes, and uploads 20,000 more."""
    monkeypatch.setattr("staged_pool.api.batches.upload.FILE_BYTES", 100_000)
    monkeypatch.setattr("staged_pool.api.limits.request_limits.UPLOAD_BYTES", 120_000)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("size", [100_001, 130_000, 2_000_000])
async def test_a_file_that_is_too_large_is_rejected_while_it_arrives(
    tmp_path: Path, size: int, announced: bool
) -> None:
    body = form(b"x" * size)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 10_000):
            yield body[start : start + 10_000]

    async with receiving(tmp_path) as (_, client):
        answer = await client.post("/v1/files", content=body if announced else pieces(), headers=FORM)
        assert answer.status_code == 413
        assert "limit of" in answer.json()["error"]["message"]


@pytest.mark.usefixtures("small_files")
async def test_a_file_of_just_the_limit_is_kept_although_other_bodies_are_smaller(tmp_path: Path) -> None:
    async with receiving(tmp_path, body_limit_bytes=1000) as (_, client):
        assert (await Asking(client).upload(b"x" * 100_000))["bytes"] == 100_000
        assert (await client.post("/v1/embeddings", json={"input": "x" * 2000})).status_code == 413


async def test_a_full_folder_takes_no_more(tmp_path: Path) -> None:
    async with receiving(tmp_path, batch_dir_limit_bytes=2**20) as (_, client):
        asked = Asking(client)
        file = await asked.upload(b"x" * 900_000)
        answer = await client.post("/v1/files", content=form(b"x" * 200_000), headers=FORM)
        assert (answer.status_code, "has no room" in answer.text) == (413, True)
        assert (await client.delete(f"/v1/files/{file['id']}")).status_code == 200
        await asked.upload(b"x" * 200_000)


async def test_a_client_that_leaves_in_the_middle_leaves_no_file(tmp_path: Path, logged: list[EventDict]) -> None:
    body = form(b"x" * 2_000_000)
    async with receiving(tmp_path) as (served, client):
        for sent in (0, 100, 1_000_000, len(body) - 1):
            async with await served.connect() as stream:
                await stream.send(head(len(body)) + body[:sent])
                await until(lambda: any((tmp_path / "uploads").iterdir()))
            await until(lambda: not served.server.state.requests)
            assert not any((tmp_path / "uploads").iterdir())
        assert (await client.get("/v1/files")).json()["data"] == []
    finished = [event for event in logged if event["event"] == "request.finished" and event["method"] == "POST"]
    assert {event["status"] for event in finished} == {499}


async def test_a_slow_client_is_answered_408_and_others_are_served_meanwhile(tmp_path: Path) -> None:
    body = form(b"x" * 300_000)
    async with receiving(tmp_path, body_timeout_s=0.3) as (served, _), await served.connect() as stream:
        await stream.send(head(len(body)) + body[:100_000])
        await served.assert_alive()
        assert statuses(await read_answer(stream)) == [408]


async def test_a_client_that_sends_steadily_may_take_longer_than_the_timeout(tmp_path: Path) -> None:
    body = form(b"x" * 400_000)
    async with receiving(tmp_path, body_timeout_s=1.5) as (served, _), await served.connect() as stream:
        await stream.send(head(len(body)))
        for start in range(0, len(body), 66_000):
            await stream.send(body[start : start + 66_000])
            await anyio.sleep(0.25)  # the test is about time: 1.75 s in all
        assert statuses(await read_answer(stream)) == [200]


async def test_tiny_pieces_are_cut_off(tmp_path: Path) -> None:
    async with receiving(tmp_path) as (served, _), await served.connect() as stream:
        await stream.send(head(None))
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:

                async def trickle() -> None:
                    try:
                        while True:
                            await stream.send(b"1\r\nx\r\n" * 100)
                    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                        return

                tasks.start_soon(trickle)
                answer = await read_answer(stream)
                tasks.cancel_scope.cancel()
    assert statuses(answer) == [400]


async def test_uploads_at_once_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staged_pool.api.app.batch_routes.UPLOADS_AT_ONCE", 1)
    body = form(b"x" * 300_000)
    async with receiving(tmp_path) as (served, client):
        async with await served.connect() as stream:
            await stream.send(head(len(body)) + body[:100])
            await until(lambda: any((tmp_path / "uploads").iterdir()))
            answer = await client.post("/v1/files", content=form(b"a"), headers=FORM)
            assert (answer.status_code, "1 uploads" in answer.text) == (503, True)
        with anyio.fail_after(30):  # the place of the client that left is free soon
            while (answer := await client.post("/v1/files", content=form(b"a"), headers=FORM)).status_code == 503:
                await anyio.lowlevel.checkpoint()
        assert answer.status_code == 200


async def test_an_upload_needs_a_key_before_it_is_read(tmp_path: Path) -> None:
    async with receiving(tmp_path, api_keys=("key",)) as (served, _), await served.connect() as stream:
        await stream.send(head(10_000_000) + b"x" * 1000)
        assert statuses(await read_answer(stream)) == [401]
        assert not any((tmp_path / "uploads").iterdir())


async def test_no_file_is_held_in_memory(tmp_path: Path) -> None:
    async with receiving(tmp_path) as (served, client):
        body = form(b"x" * 20_000_000)
        async with await served.connect() as stream:
            await stream.send(head(len(body)) + body[:15_000_000])
            assert served.server.state.body_bytes == 0
            await stream.send(body[15_000_000:])
            answer = await read_answer(stream)
        file = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert file["bytes"] == 20_000_000
        assert len((await client.get(f"/v1/files/{file['id']}/content")).content) == 20_000_000
