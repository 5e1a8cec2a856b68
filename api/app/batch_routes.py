"""Routes of OpenAI's files and batches, for a server with a folder for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import anyio
import anyio.to_thread

from staged_pool.api import status
from staged_pool.api.addresses import CANCEL_BATCH, FILE_CONTENT, ONE_BATCH, ONE_FILE
from staged_pool.api.app.batch_service import Batches
from staged_pool.api.app.body_reader import BodyReader
from staged_pool.api.app.call import Answer, Call, Handler, OpenFile
from staged_pool.api.app.engine_choice import no_model
from staged_pool.api.app.engine_registry import RETRY_AFTER_S, EngineRegistry
from staged_pool.api.app.tasks import TASKS
from staged_pool.api.batches.records import KEPT_S, Batch, StoredFile, new_batch_id, new_file_id, window_s
from staged_pool.api.batches.upload import Uploaded, drop_upload, receive_upload
from staged_pool.api.limits.request_limits import party_of
from staged_pool.api.limits.uploads import BATCHES, FILES
from staged_pool.api.status import HttpError
from staged_pool.api.wire.batch_fields import Page, decode_batch, kept_s, read_page
from staged_pool.api.wire.chunked_json import dump
from staged_pool.runtime.memory.budget import ByteAccount, Holding
from staged_pool.stages.errors import EngineStopped, InvalidInput

R = TypeVar("R", StoredFile, Batch)

UPLOADS_AT_ONCE: Final = 16
"""Maximum number of uploads at once; one party leaves some to others."""

_WRITERS: Final = 2
"""Threads that parse and write uploads."""

_BINARY: Final = b"application/octet-stream"


class BatchRoutes:
    """Handlers of files and batches.

    Args:
        registry: The engines.
        bodies: Reads bodies.
        batches: Files and batches of the server.
    """

    def __init__(self, registry: EngineRegistry, bodies: BodyReader, batches: Batches) -> None:
        self._registry = registry
        self._bodies = bodies
        self._store = batches.store
        self._runner = batches.runner
        self._uploads = ByteAccount(UPLOADS_AT_ONCE)  # counts uploads, shared by the same rule as bytes
        self._writers = anyio.CapacityLimiter(_WRITERS)

    def table(self) -> Mapping[str, Mapping[str, Handler]]:
        """Return the handlers by path and method."""
        return {
            FILES: {"GET": self._list_files, "POST": self._upload},
            ONE_FILE: {"GET": self._file, "DELETE": self._delete_file},
            FILE_CONTENT: {"GET": self._content},
            BATCHES: {"GET": self._list_batches, "POST": self._create},
            ONE_BATCH: {"GET": self._batch},
            CANCEL_BATCH: {"POST": self._cancel},
        }

    # Files

    async def _upload(self, call: Call) -> Answer:
        self._check_open()
        self._store.check_room_for_file(call.owner)
        with self._uploads.hold(party_of(call.scope)) as upload:
            if not upload.take(1):
                message = f"The server already receives its maximum of {UPLOADS_AT_ONCE} uploads"
                raise HttpError(status.TOO_MANY_REQUESTS, message, retry_after_s=5.0)
            held = self._store.disk.hold(call.owner)
            try:
                return Answer(dump((await self._receive(call, held)).shown()))
            except BaseException:
                held.give_back()
                raise

    async def _receive(self, call: Call, held: Holding) -> StoredFile:
        folder = self._store.folder
        kind = call.headers.get(b"content-type", b"")
        uploaded = await receive_upload(folder, kind, call.next_piece, held, self._writers)
        try:
            file = self._made_of(uploaded, call.owner)
            await self._store.add_file(file, partial(folder.keep_upload, uploaded.path), held)
        except BaseException:
            await drop_upload(uploaded.path, self._writers)
            raise
        return file

    def _made_of(self, uploaded: Uploaded, owner: str) -> StoredFile:
        if uploaded.fields.get("purpose") != "batch":
            raise InvalidInput("purpose: expected batch, the only purpose of uploads here", param="purpose")
        now = self._store.clock()
        return StoredFile(
            id=new_file_id(),
            owner=owner,
            filename=uploaded.filename,
            purpose="batch",
            size=uploaded.size,
            created_at=int(now),
            order=int(now * 1e9),
            expires_at=int(now) + kept_s(uploaded.fields, KEPT_S),
        )

    async def _list_files(self, call: Call) -> Answer:
        page = read_page(call.scope["query_string"], most=10_000, default=10_000)
        files = [file for file in self._store.files(call.owner) if page.purpose in (None, file.purpose)]
        return Answer(dump(_listed(files, page)))

    async def _file(self, call: Call) -> Answer:
        return Answer(dump(self._store.file(call.object_id, call.owner).shown()))

    async def _delete_file(self, call: Call) -> Answer:
        file = self._store.file(call.object_id, call.owner)
        await self._store.delete_file(file)
        return Answer(dump({"id": file.id, "object": "file", "deleted": True}))

    async def _content(self, call: Call) -> Answer:
        file = self._store.file(call.object_id, call.owner)
        opened = OpenFile(await self._store.open_content(file), file.size)
        nosniff = [(b"x-content-type-options", b"nosniff")]  # it is whatever a client has sent
        return Answer(file=opened, content_type=_BINARY, headers=nosniff)

    # Batches

    async def _create(self, call: Call) -> Answer:
        self._check_open()
        fields = decode_batch(await self._bodies.json(call))
        seconds = window_s(fields.completion_window)
        self._check_endpoint(fields.endpoint)
        if self._store.file(fields.input_file_id, call.owner).purpose != "batch":
            raise InvalidInput("input_file_id: expected a file with the purpose batch", param="input_file_id")
        now, kept = self._store.clock(), fields.output_expires_after
        batch = Batch(
            id=new_batch_id(),
            owner=call.owner,
            tenant=call.tenant,
            endpoint=fields.endpoint,
            input_file_id=fields.input_file_id,
            completion_window=fields.completion_window,
            metadata=fields.metadata,
            created_at=int(now),
            order=int(now * 1e9),
            expires_at=int(now) + seconds,
            output_expires_s=KEPT_S if kept is None else kept.seconds,
            output_id=new_file_id(),
            errors_id=new_file_id(),
        )
        await self._store.add_batch(batch)
        self._runner.wake()
        return Answer(dump(batch.shown()))

    def _check_endpoint(self, endpoint: str) -> None:
        self._registry.enter()  # raises while models load
        engines = self._registry.engines
        if (task := TASKS.get(endpoint)) is None:
            message = "endpoint: expected the path of a task, such as /v1/embeddings or /v1/rerank"
            raise InvalidInput(message, param="endpoint")
        if not any(task.has_path(engine.card) for engine in engines):
            raise no_model(task, engines)

    async def _list_batches(self, call: Call) -> Answer:
        page = read_page(call.scope["query_string"], most=100, default=20)
        return Answer(dump(_listed(self._store.batches(call.owner), page)))

    async def _batch(self, call: Call) -> Answer:
        return Answer(dump(self._store.batch(call.object_id, call.owner).shown()))

    async def _cancel(self, call: Call) -> Answer:
        batch = self._store.batch(call.object_id, call.owner)
        batch = await self._store.change(batch.id, {"validating": "cancelling", "in_progress": "cancelling"})
        if batch.status not in ("cancelling", "cancelled"):
            raise InvalidInput(f"The batch cannot be cancelled any more: its status is {batch.status}")
        self._runner.cancel(batch)
        return Answer(dump(batch.shown()))

    def _check_open(self) -> None:
        """Reject new work while the server drains."""
        if self._registry.leaving:
            message = f"The server accepts no requests: {self._registry.not_ready}"
            raise EngineStopped(message, retry_after_s=RETRY_AFTER_S)


def _listed(found: Sequence[R], page: Page) -> dict[str, object]:
    """Return the part of a list that a page asks for, as clients read it.

    Raises:
        InvalidInput: The list has no object `after`.
    """
    ordered = list(reversed(found)) if page.newest_first else list(found)
    if page.after is not None:
        places = [place for place, each in enumerate(ordered) if each.id == page.after]
        if not places:
            raise InvalidInput("after: expected the id of an object in the list", param="after")
        ordered = ordered[places[0] + 1 :]
    shown = ordered[: page.limit]
    return {
        "object": "list",
        "data": [each.shown() for each in shown],
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": len(ordered) > page.limit,
    }
