"""Routes by which operators load and unload models, below `/admin`."""

from __future__ import annotations

import time
from collections.abc import Mapping

from staged_pool.api import status
from staged_pool.api.addresses import ADMIN_MODELS, ONE_ADMIN_MODEL
from staged_pool.api.app.body_reader import BodyReader
from staged_pool.api.app.call import Answer, Call, Handler
from staged_pool.api.app.model_admin import ModelAdmin
from staged_pool.api.app.model_records import ModelRecord
from staged_pool.api.status import HttpError
from staged_pool.api.wire.chunked_json import dump
from staged_pool.api.wire.model_admin import read_load, read_wait_s


class AdminRoutes:
    """Handlers of operators' routes.

    Args:
        admin: Loads and unloads models.
        bodies: Reads bodies.
    """

    def __init__(self, admin: ModelAdmin, bodies: BodyReader) -> None:
        self._admin = admin
        self._bodies = bodies

    def table(self) -> Mapping[str, Mapping[str, Handler]]:
        """Return the handlers by path and method."""
        return {
            ADMIN_MODELS: {"GET": self._list, "POST": self._load},
            ONE_ADMIN_MODEL: {"GET": self._one, "DELETE": self._remove},
        }

    async def _list(self, call: Call) -> Answer:
        records = self._admin.records
        weights = sum(record.weights_bytes for record in records)
        found = {"object": "list", "data": list(map(_shown, records)), "weights_bytes": weights}
        return Answer(dump({**found, "models_memory_bytes": self._admin.limit_bytes}))

    async def _one(self, call: Call) -> Answer:
        found = [record for record in self._admin.records if record.name == call.object_id]
        if not found:
            raise HttpError(status.NO_OBJECT, "There is no such model; GET /admin/models lists all")
        return Answer(dump(_shown(found[-1])))

    async def _load(self, call: Call) -> Answer:
        wait_s = read_wait_s(call.scope["query_string"])
        wanted = read_load(await self._bodies.json(call), self._admin.base)
        return await self._outcome(self._admin.load(wanted), wait_s)

    async def _remove(self, call: Call) -> Answer:
        wait_s = read_wait_s(call.scope["query_string"])
        record = self._admin.remove(call.object_id)
        if record.state == "failed":
            return Answer(dump(_shown(record)))
        return await self._outcome(record, wait_s)

    async def _outcome(self, record: ModelRecord, wait_s: float) -> Answer:
        """Answer with the end of an operation, or with 202 if it takes longer."""
        if not await self._admin.wait(record, wait_s):
            return Answer(dump(_shown(record)), 202)
        if record.problem is not None:
            raise HttpError.of(record.problem)
        return Answer(dump(_shown(record)))


def _shown(record: ModelRecord) -> dict[str, object]:
    """Return a model as operators read it."""
    engine = record.engine
    admission = None if engine is None else engine.statistics().admission
    used = engine is not None and admission is not None and admission.admitted > 0
    return {
        "object": "model",
        "name": record.name,
        "model": record.config.model,
        "state": record.state,
        "reason": None if record.problem is None else record.problem.message,
        "since": round(record.since, 3),
        "last_used": round(time.time() - engine.idle_s, 3) if used and engine is not None else None,
        "in_flight": 0 if admission is None else admission.requests,
        "weights_bytes": record.weights_bytes,
        "pinned": record.pinned,
    }
