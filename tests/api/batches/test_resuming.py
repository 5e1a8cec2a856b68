"""Batches survive the death of their server, and a folder survives whatever is in it."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import anyio
import httpx
import psutil
import pytest
from structlog.typing import EventDict

from staged_pool.api.batches.folder import Folder
from staged_pool.api.batches.records import KEPT_S, Batch, StoredFile, new_batch_id, new_file_id
from staged_pool.api.batches.store import Store
from staged_pool.api.limits.uploads import FILE_BYTES
from tests.api.batches.asking import Asking, requests
from tests.servers.on_socket import serving
from tests.servers.process import ServerProcess, serve_command
from tests.servers.tiny_models import folder as model_folder

LINES = 2000


def form_of(content: bytes) -> dict[str, Any]:
    """Make the arguments of an upload."""
    return {"files": {"file": ("lines.jsonl", content)}, "data": {"purpose": "batch"}}


def test_after_a_sigkill_each_line_is_answered_once(tmp_path: Path) -> None:
    flags = ("--model", str(model_folder("embedder")), "--dtype", "float32", "--batch-dir", str(tmp_path / "batches"))
    with _Server(flags, tmp_path / "log") as server:
        file = server.client.post("/v1/files", **form_of(requests(LINES))).raise_for_status().json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
        batch_id = server.client.post("/v1/batches", json=body).raise_for_status().json()["id"]
        server.kill_once_begun(batch_id)
    with _Server(flags, tmp_path / "log") as server:
        server.process.wait_until(lambda: server.batch(batch_id)["status"] == "completed", within_s=120)
        batch = server.batch(batch_id)
        output = server.client.get(f"/v1/files/{batch['output_file_id']}/content").content
    assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    names = [json.loads(line)["custom_id"] for line in output.splitlines()]
    assert sorted(names) == sorted(f"r{number}" for number in range(LINES))


@pytest.mark.long
def test_the_largest_upload_leaves_memory_as_it_was(tmp_path: Path) -> None:
    flags = ("--model", str(model_folder("embedder")), "--dtype", "float32", "--batch-dir", str(tmp_path / "batches"))
    large = tmp_path / "large"
    large.write_bytes(b"x" * (FILE_BYTES - 1))
    with _Server(flags, tmp_path / "log") as server, large.open("rb") as file:
        process = psutil.Process(server.process.process.pid)
        for content in (io.BytesIO(b"x" * 2**20), file):  # the first one warms up
            before = process.memory_info().rss
            upload = server.client.post("/v1/files", files={"file": ("a", content)}, data={"purpose": "batch"})
            file_id = upload.raise_for_status().json()["id"]
            with server.client.stream("GET", f"/v1/files/{file_id}/content") as answer:
                size = sum(map(len, answer.iter_bytes()))
            after = process.memory_info().rss
    assert size == FILE_BYTES - 1
    assert after - before < 16 * 2**20


class _Server:
    """A server process, and a client of its batches."""

    def __init__(self, flags: Sequence[str], log: Path) -> None:
        self._stack = ExitStack()
        self.process = self._stack.enter_context(ServerProcess(serve_command(*flags), log))
        self.process.wait_ready()
        url = f"http://127.0.0.1:{self.process.port}"
        self.client = self._stack.enter_context(httpx.Client(base_url=url, timeout=30))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def batch(self, batch_id: str) -> Any:
        """Return a batch."""
        return self.client.get(f"/v1/batches/{batch_id}").raise_for_status().json()

    def kill_once_begun(self, batch_id: str) -> None:
        """Kill the server once some lines of a batch are done."""
        self.process.wait_until(lambda: self.batch(batch_id)["request_counts"]["completed"] > 0, within_s=60)
        self.process.process.send_signal(signal.SIGKILL)
        self.process.process.wait()


def stored(now: float, **values: Any) -> StoredFile:
    """Make a file."""
    return StoredFile(
        id=new_file_id(),
        owner="",
        filename="a",
        purpose="batch",
        size=1,
        created_at=int(now),
        order=int(now * 1e9),
        expires_at=int(now) + 3600,
        **values,
    )


def batch_of(file: StoredFile, **values: Any) -> Batch:
    """Make a batch."""
    made = Batch(
        id=new_batch_id(),
        owner="",
        tenant=None,
        endpoint="/v1/embeddings",
        input_file_id=file.id,
        completion_window="24h",
        metadata=None,
        created_at=file.created_at,
        order=file.order,
        expires_at=file.created_at + 86_400,
        output_id=new_file_id(),
        errors_id=new_file_id(),
    )
    return replace(made, **values)


def put(folder: Folder, file: StoredFile) -> None:
    """Save a file of one byte."""
    folder.content(file.id).write_bytes(b"a")
    folder.save_file(file)


@pytest.mark.anyio
@pytest.mark.usefixtures("servers_may_import")
@pytest.mark.parametrize("status", ["validating", "in_progress", "finalizing", "cancelling"])
async def test_a_batch_of_any_status_comes_to_its_end(tmp_path: Path, status: str) -> None:
    """A process may end right after each change of the status."""
    folder = Folder(tmp_path)
    file = replace(stored(0.0), size=len(requests(3)), expires_at=2**40)
    await anyio.Path(folder.content(file.id)).write_bytes(requests(3))
    folder.save_file(file)
    batch = batch_of(file, status=status, expires_at=2**40, total=0 if status == "validating" else 3)
    if status == "finalizing":
        batch = replace(batch, ending="expired")
    folder.save_batch(batch)
    folder.close()
    async with serving(batch_dir=tmp_path) as served, served.client() as client:
        ended = await Asking(client).ended(batch.id)
    wanted = {"finalizing": ("expired", 0, 3), "cancelling": ("cancelled", 0, 3)}.get(status, ("completed", 3, 0))
    counts = ended["request_counts"]
    assert (ended["status"], counts["completed"], counts["failed"]) == wanted


@pytest.mark.anyio
@pytest.mark.usefixtures("servers_may_import")
async def test_output_that_is_complete_is_not_made_again(tmp_path: Path) -> None:
    """The process ended between the naming of the output and the end of the batch."""
    folder = Folder(tmp_path)
    file = replace(stored(0.0), expires_at=2**40)
    put(folder, file)
    batch = batch_of(file, status="in_progress", expires_at=2**40, total=2)
    await anyio.Path(folder.content(batch.output_id)).write_bytes(b'{"custom_id": "a"}\n')
    await anyio.Path(folder.content(batch.errors_id)).write_bytes(b'{"custom_id": "b"}\n')
    folder.save_batch(batch)
    folder.close()
    async with serving(batch_dir=tmp_path) as served, served.client() as client:
        asked = Asking(client)
        ended = await asked.ended(batch.id)
        assert ended["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        assert await asked.content(ended["output_file_id"]) == [{"custom_id": "a"}]


@pytest.mark.anyio
@pytest.mark.usefixtures("servers_may_import")
async def test_a_batch_whose_input_is_gone_fails(tmp_path: Path, logged: list[EventDict]) -> None:
    folder = Folder(tmp_path)
    file = replace(stored(0.0), expires_at=2**40)
    folder.save_file(file)
    batch = batch_of(file, expires_at=2**40)
    folder.save_batch(batch)
    folder.close()
    async with serving(batch_dir=tmp_path) as served, served.client() as client:
        ended = await Asking(client).ended(batch.id)
        assert (ended["status"], ended["errors"]["data"][0]["code"]) == ("failed", "storage_failed")
    assert "batch.storage_failed" in [event["event"] for event in logged]


# The folder


def test_a_crash_leaves_whole_objects_only(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    file = stored(0.0)
    put(folder, file)
    batch = batch_of(file)
    folder.save_batch(batch)
    for name in (f"files/{new_file_id()}.content", f"files/{file.id}.json.new", "uploads/0123"):
        (tmp_path / name).write_bytes(b"half")
    folder.close()
    folder = Folder(tmp_path)
    assert folder.load() == ([file], [batch])
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == sorted([f"{batch.id}.json", f"{file.id}.content", f"{file.id}.json", f"{file.id}.json.new", "lock"])
    folder.close()


def test_what_cannot_be_read_is_left_alone(tmp_path: Path, logged: list[EventDict]) -> None:
    folder = Folder(tmp_path)
    file = stored(0.0)
    put(folder, file)
    strange = new_file_id()
    folder.content(strange).write_bytes(b"of a newer version")
    (tmp_path / "files" / f"{strange}.json").write_text('{"id": 7}')
    assert folder.load() == ([file], [])
    assert folder.content(strange).exists()
    assert [event["event"] for event in logged] == ["batches.unreadable"]
    folder.close()


def test_only_the_user_of_the_server_reads_the_folder(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "batches")
    for path in (tmp_path / "batches", *(tmp_path / "batches").iterdir()):
        assert not path.is_dir() or path.stat().st_mode & 0o777 == 0o700
    folder.close()


@pytest.mark.anyio
@pytest.mark.usefixtures("servers_may_import")
async def test_what_has_expired_is_deleted_unless_a_batch_reads_it(tmp_path: Path) -> None:
    folder, now = Folder(tmp_path), 1000.0
    old, read = stored(now), stored(now)
    ended = batch_of(old, status="completed", times={"completed": 1000})
    for file in (old, read):
        put(folder, file)
    for batch in (batch_of(read), ended):
        folder.save_batch(batch)
    store = Store(folder, 2**30, lambda: now)
    await store.load()
    assert store.disk.held_bytes == 2
    now += 3600
    await store.sweep()
    assert not folder.content(old.id).exists()
    assert folder.content(read.id).exists()
    assert (store.disk.held_bytes, store.files("")) == (1, [])
    now += KEPT_S
    await store.sweep()
    assert [batch.status for batch in store.batches("")] == ["validating"]
    folder.close()
