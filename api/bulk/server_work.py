"""Work on the lines of batches by a running server."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import anyio
import msgspec

from staged_pool.api.bulk.batch_lines import NOT_JSON, BatchAnswer, BatchAnswers, BatchLine
from staged_pool.api.bulk.patience import until_admitted
from staged_pool.client import AsyncClient
from staged_pool.client.exchange import JSON, ServerAnswer, ServerRequest
from staged_pool.stages import foreign_json

_ANSWERS: Final = frozenset(range(100, 600)) - {429, 503}
"""Statuses that are the answer of a line: all but those which ask for a retry."""

_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _on_one_line(body: bytes) -> bytes:
    return msgspec.json.format(body, indent=-1) if b"\n" in body else body


class BulkClient(AsyncClient):
    """Client whose requests have bulk priority, and which can send any request."""

    def _connect(self) -> None:
        super()._connect()
        self._http.headers["x-priority"] = "bulk"

    async def send(self, request: ServerRequest) -> ServerAnswer:
        """Send a request with the retries of the client. Returns an answer with one of the statuses `results`.

        Raises:
            StagedPoolError: The server cannot be reached, or takes no requests.
        """
        deadline = self._settings.deadline(None, anyio.current_time())
        return await self._answer(request, deadline, self._exchange_once)


class ServerWork:
    """Answers lines of batches by sending them to a server.

    Args:
        client: Sends the requests.
        answers: Makes the lines of the output.
    """

    def __init__(self, client: BulkClient, answers: BatchAnswers) -> None:
        self._client = client
        self._answers = answers

    async def do(self, lines: Sequence[BatchLine]) -> Sequence[BatchAnswer]:
        """Answer lines one after the other; see `Work.do`.

        Raises:
            StagedPoolError: See `BulkClient.send`.
        """
        return [await self._answer(line) for line in lines]

    async def _answer(self, line: BatchLine) -> BatchAnswer:
        if line.fault is not None:
            return self._answers.refused(line, line.fault)
        fields = foreign_json.decode(line.body, _FIELDS.decode)
        request = ServerRequest(path=line.url, fields=fields, results=_ANSWERS)
        answer = await until_admitted(partial(self._client.send, request))
        if not answer.headers.get("content-type", "").startswith(JSON):
            return self._answers.refused(line, NOT_JSON)
        try:
            body = foreign_json.decode(answer.body, _on_one_line, most_bytes=foreign_json.ANY_SIZE, most_depth=None)
        except (msgspec.DecodeError, foreign_json.BadJson):
            return self._answers.refused(line, NOT_JSON)
        return self._answers.answered(line, answer.status, body, answer.headers.get("x-request-id"))
