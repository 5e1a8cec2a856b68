"""A folder of batches that cannot be written or read: batches fail, and the server goes on."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.typing import EventDict

from staged_pool.api.batches import folder as folders
from staged_pool.api.batches.folder import Folder
from staged_pool.api.batches.records import Batch
from staged_pool.api.batches.runner import BatchRunner
from staged_pool.api.batches.store import Store
from staged_pool.stages.errors import ConfigError
from tests.api.batches.asking import Asking, requests
from tests.api.batches.test_resuming import batch_of, put, stored
from tests.servers.on_socket import serving
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.waiting import until

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
READ_ONLY = OSError(errno.EROFS, os.strerror(errno.EROFS))
FORBIDDEN = PermissionError(errno.EACCES, os.strerror(errno.EACCES))


class Disk:
    """Makes some functions on files raise an error, from `fail` to `mend`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._error: OSError | None = None

    def hold(self, owner: object, *names: str) -> None:
        """Put functions of a class or module under this disk."""
        for name in names:
            self._monkeypatch.setattr(owner, name, self._failing(getattr(owner, name)))

    def _failing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if self._error is not None:
                raise self._error
            return function(*args)

        return call

    def fail(self, error: OSError) -> None:
        self._error = error

    def mend(self) -> None:
        self._error = None


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staged_pool.api.batches.runner.RETRY_S", 0.01)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@asynccontextmanager
async def at_the_gate(folder: Path) -> AsyncIterator[tuple[Asking, Gate, Any]]:
    """A server whose batch of three requests stands before its forward."""
    gate = Gate()
    async with serving(LetterModel(on_forward=gate), batch_dir=folder) as served, served.client() as client:
        asking = Asking(client)
        try:
            batch = await asking.create(requests(3))
            await gate.arrived()
            yield asking, gate, batch
        finally:
            gate.open()


async def serves(asking: Asking) -> None:
    """Check that the server answers a request that is no batch's."""
    assert (await asking.post("/v1/embeddings", {"input": "x"}))["data"]


def is_saved_as_failed(folder: Path, batch_id: str) -> bool:
    """Read the record of a batch."""
    return b'"status":"failed"' in (folder / "batches" / f"{batch_id}.json").read_bytes()


def parts(folder: Path) -> list[Path]:
    """List the parts of unfinished output."""
    return list(folder.glob("files/*.part"))


def contents(folder: Path) -> list[str]:
    """List the contents of files and output, complete or not."""
    return [path.name for path in folder.glob("files/*.content*")]


pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("servers_may_import")]


@pytest.mark.parametrize("error", [FULL, READ_ONLY, FORBIDDEN], ids=["full", "read_only", "forbidden"])
async def test_a_batch_that_cannot_be_saved_fails_alone_and_is_saved_later(
    tmp_path: Path, disk: Disk, error: OSError, logged: list[EventDict]
) -> None:
    disk.hold(folders, "_save")
    async with at_the_gate(tmp_path) as (asking, gate, batch):
        disk.fail(error)
        gate.open()
        ended = await asking.ended(batch["id"])
        assert (ended["status"], ended["errors"]["data"][0]["code"]) == ("failed", "storage_failed")
        await until(lambda: [event["event"] for event in logged].count("batch.not_saved") > 2)
        await serves(asking)
        disk.mend()
        await until(partial(is_saved_as_failed, tmp_path, batch["id"]))
        again = await asking.create(requests(3))  # the disk is mended, and so is the owner's turn
        assert (await asking.ended(again["id"]))["status"] == "completed"


async def test_a_server_that_starts_on_a_full_disk_serves(tmp_path: Path, disk: Disk) -> None:
    """The batch is resumed at each start, and fails again."""
    disk.hold(folders, "_save")
    folder = Folder(tmp_path)
    file = replace(stored(0.0), size=len(requests(3)), expires_at=2**40)
    await anyio.Path(folder.content(file.id)).write_bytes(requests(3))
    folder.save_file(file)
    batch = batch_of(file, expires_at=2**40)
    folder.save_batch(batch)
    folder.close()
    disk.fail(FULL)
    for _ in range(2):
        async with serving(batch_dir=tmp_path) as served, served.client() as client:
            assert (await Asking(client).ended(batch.id))["status"] == "failed"
            await serves(Asking(client))
    disk.mend()
    async with serving(batch_dir=tmp_path) as served, served.client() as client:
        assert (await Asking(client).ended(batch.id))["status"] == "completed"


@pytest.mark.parametrize(
    "names",
    [("is_published",), ("part_bytes",), ("measure",), ("remove_parts", "save_batch"), ("save_file",)],
    ids=lambda names: names[0],
)
async def test_no_call_of_the_folder_ends_the_server(
    tmp_path: Path, disk: Disk, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("staged_pool.api.batches.runner.DISK_CHECK_S", 0.0)
    disk.hold(Folder, *names)
    async with at_the_gate(tmp_path) as (asking, gate, batch):
        disk.fail(FULL)
        gate.open()
        assert (await asking.ended(batch["id"]))["status"] == "failed"
        await serves(asking)


async def test_output_that_cannot_be_listed_is_removed(tmp_path: Path, disk: Disk) -> None:
    """Nobody can delete it, and its bytes count for nobody."""
    disk.hold(Folder, "save_file")
    async with at_the_gate(tmp_path) as (asking, gate, batch):
        disk.fail(FULL)
        gate.open()
        assert (await asking.ended(batch["id"]))["status"] == "failed"
        (file,) = (await asking.get("/v1/files"))["data"]
        await until(lambda: contents(tmp_path) == [f"{file['id']}.content"])


@pytest.mark.parametrize("name", ["new_upload", "keep_upload"])
async def test_an_upload_that_cannot_be_written_fails_alone(tmp_path: Path, disk: Disk, name: str) -> None:
    disk.hold(Folder, name)
    async with serving(batch_dir=tmp_path) as served, served.client() as client:
        asking = Asking(client)
        disk.fail(FULL)
        form: Any = {"files": {"file": ("a", b"1")}, "data": {"purpose": "batch"}}
        assert (await asking.send("POST", "/v1/files", **form)).status_code == 500
        assert await asking.get("/v1/files") == {**await asking.get("/v1/files"), "data": []}
        disk.mend()
        assert (await asking.send("POST", "/v1/files", **form)).status_code == 200


async def test_an_upload_whose_file_cannot_be_removed_gives_its_own_error(tmp_path: Path, disk: Disk) -> None:
    async with serving(batch_dir=tmp_path) as served, served.client() as client:
        disk.hold(Path, "unlink")
        disk.fail(READ_ONLY)
        form: Any = {"files": {"file": ("a", b"1")}, "data": {"purpose": "something else"}}
        answer = await Asking(client).send("POST", "/v1/files", **form)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "purpose")
        disk.mend()


async def test_what_cannot_be_deleted_is_kept_and_keeps_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[EventDict]
) -> None:
    folder, now = Folder(tmp_path), 10.0**9
    stuck, free = stored(0.0), stored(1.0)
    old: list[Batch] = [batch_of(stuck, status="failed", times={"failed": 1}) for _ in range(2)]
    for file in (stuck, free):
        put(folder, file)
    for batch in old:
        folder.save_batch(batch)
    is_stuck = True
    kept = {stuck.id, old[0].id}

    def deleting(name: str) -> None:
        function = getattr(folder, name)

        def call(object_id: str) -> None:
            if is_stuck and object_id in kept:
                raise FORBIDDEN
            function(object_id)

        monkeypatch.setattr(folder, name, call)

    deleting("remove_file")
    deleting("remove_batch")
    store = Store(folder, 2**30, lambda: now)
    await store.load()
    await store.sweep()
    assert [event["id"] for event in logged if event["event"] == "batches.not_deleted"] == [stuck.id, old[0].id]
    assert store.disk.held_bytes == 1  # of the file that is still there
    assert [batch.id for batch in store.batches("")] == [old[0].id]
    assert not folder.content(free.id).exists()
    is_stuck = False
    await store.sweep()
    assert (store.disk.held_bytes, store.batches("")) == (0, [])
    assert not folder.content(stuck.id).exists()
    folder.close()


async def test_a_failing_sweep_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[EventDict]
) -> None:
    monkeypatch.setattr("staged_pool.api.batches.runner.SWEEP_S", 0.0)
    folder = Folder(tmp_path)
    store = Store(folder, 2**30)
    tries = 0

    async def sweep() -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise RuntimeError("a bug")

    monkeypatch.setattr(store, "sweep", sweep)
    runner = BatchRunner(store, lambda answers, tenant: pytest.fail("no batch runs"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        runner.start()
        await until(lambda: tries > 3)
        runner.stop()
    assert [event["event"] for event in logged].count("batches.sweep_failed") == 2
    folder.close()


async def test_a_batch_that_fills_the_disk_gives_it_back_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record cannot be saved beside the output that fills the disk."""
    saved = folders._save

    def save(path: Path, content: bytes) -> None:
        if b'"status":"failed"' in content and parts(tmp_path):
            raise FULL
        saved(path, content)

    async with at_the_gate(tmp_path) as (asking, gate, batch):
        monkeypatch.setattr(folders, "_save", save)
        monkeypatch.setattr("staged_pool.api.bulk.lines_writer.write_all", _no_room)
        gate.open()
        assert (await asking.ended(batch["id"]))["status"] == "failed"
        await until(partial(is_saved_as_failed, tmp_path, batch["id"]))
        assert not parts(tmp_path)


def _no_room(*_: object) -> None:
    raise FULL


def test_a_folder_that_cannot_be_read_is_named_at_the_start(tmp_path: Path, disk: Disk) -> None:
    disk.hold(Path, "iterdir", "glob")
    disk.fail(FORBIDDEN)
    with pytest.raises(ConfigError, match=r"batch_dir='.*': cannot be used \(Permission denied\)"):
        Folder(tmp_path)
    disk.mend()
    folder = Folder(tmp_path)  # the failed one holds no lock
    disk.fail(FORBIDDEN)
    with pytest.raises(ConfigError, match="cannot be used"):
        folder.load()
    folder.close()


def test_what_is_left_of_an_earlier_server_may_stay(tmp_path: Path, disk: Disk, logged: list[EventDict]) -> None:
    for folder in ("files", "uploads"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "left.content").write_bytes(b"a")
    disk.hold(Path, "unlink")
    disk.fail(READ_ONLY)
    opened = Folder(tmp_path)
    assert opened.load() == ([], [])
    assert [event["event"] for event in logged] == ["batches.not_removed"] * 2
    opened.close()


def test_a_record_that_cannot_be_read_is_left_alone(tmp_path: Path, disk: Disk, logged: list[EventDict]) -> None:
    folder = Folder(tmp_path)
    file = stored(0.0)
    put(folder, file)
    disk.hold(Path, "read_bytes")
    disk.fail(FORBIDDEN)
    assert folder.load() == ([], [])
    assert folder.content(file.id).exists()
    assert [event["event"] for event in logged] == ["batches.unreadable"]
    folder.close()
