"""Lines of OpenAI's batches: one request a line in, one answer a line out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson

from staged_pool.api.bulk.custom_ids import CustomIds
from staged_pool.api.bulk.text_file import LineReader, RawLine
from staged_pool.api.wire.chunked_json import Pieces, pieces_of
from staged_pool.api.wire.json_decode import reason
from staged_pool.runtime.memory.answers import AnswerMemory
from staged_pool.stages import foreign_json, foreign_text

EXAMPLE: Final = '{"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a text"}}'
"""A line that is right, for errors."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Reason why a line cannot be sent as a request."""

    code: str
    """Kind of the fault, a word for programs."""
    message: str


NOT_JSON: Final = Fault(
    "answer_not_json", "The answer is not JSON, as a line must be; ask for another encoding_format, such as base64"
)
"""Fault of a line whose request asks for an answer in another format."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch."""

    number: int
    custom_id: str | None
    """The client's name of the request; None if the line has none."""
    url: str = ""
    body: bytes = b""
    """JSON object, as written."""
    fault: Fault | None = None
    """Set if the line is no request; the rest is then empty."""

    @property
    def size(self) -> int:
        """Approximate bytes in memory."""
        return len(self.body) + len(self.url) + 256


class _Given(msgspec.Struct):
    custom_id: Any = None
    method: Any = "POST"
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


_DECODER: Final = msgspec.json.Decoder(_Given)
_DAMAGED: Final = re.compile("[\ud800-\udfff\ufffd]")
"""Halves of surrogate pairs, and replacements of bytes that are not UTF-8."""


def read_batch_line(raw: RawLine) -> BatchLine:
    """Read one line. A line that is no request has a `fault`, and never raises."""

    def wrong(code: str, message: str, custom_id: str | None = None) -> BatchLine:
        return BatchLine(raw.number, custom_id, fault=Fault(code, message))

    if raw.fault:
        return wrong("line_too_long", raw.fault)
    try:
        foreign_text.decoded(raw.content, line=raw.number + 1)  # the body, which is decoded later, is a part of it
        given = foreign_json.decode(raw.content, _DECODER.decode, line=raw.number + 1)
    except (msgspec.DecodeError, foreign_json.BadJson, foreign_text.BadText) as error:
        why = reason(error, raw.content) if isinstance(error, msgspec.DecodeError) else str(error)
        message = f"The line is no valid JSON object ({why}); a line that is right: {EXAMPLE}"
        return wrong("invalid_json_line", message, _custom_id_of(raw.content))
    custom_id = given.custom_id
    if not isinstance(custom_id, str) or not custom_id:
        return wrong("missing_custom_id", "custom_id: expected a text that names the request")
    if given.method != "POST":
        return wrong("invalid_method", "method: expected POST, which every request of a model is", custom_id)
    if not isinstance(given.url, str) or not given.url.startswith("/"):
        return wrong("invalid_url", "url: expected the path of a route, such as /v1/embeddings", custom_id)
    body = bytes(given.body)
    if not body.startswith(b"{"):
        return wrong("invalid_body", "body: expected a JSON object, the body of the request", custom_id)
    return BatchLine(raw.number, custom_id, given.url, body)


def _custom_id_of(content: bytes) -> str | None:
    """Return the `custom_id` of a line with a wrong text in another place; None if it cannot be told."""
    try:
        given = foreign_json.decode(content.decode(errors="replace"))
    except foreign_json.BadJson:
        return None
    custom_id = given.get("custom_id") if isinstance(given, dict) else None
    if not isinstance(custom_id, str) or not custom_id or _DAMAGED.search(custom_id):
        return None
    return custom_id


class UniqueLines:
    """Reads the lines of one job, in order, and finds a repeated `custom_id`.

    Such a line has a fault, because answers are told apart by their `custom_id` alone. A resumed job reads its input
    from the beginning, so it finds the same lines.
    """

    def __init__(self) -> None:
        self._ids = CustomIds()

    def read(self, raw: RawLine) -> BatchLine:
        """Read the next line; see `read_batch_line`."""
        line = read_batch_line(raw)
        if line.custom_id is None:
            return line
        first = self._ids.first_line(line.custom_id, line.number)
        if first == line.number or line.fault is not None:
            return line
        message = f"custom_id: line {first + 1} has the same one; name each request differently"
        return replace(line, url="", body=b"", fault=Fault("duplicate_custom_id", message))


def batch_reader(path: Path) -> LineReader[BatchLine]:
    """Open a file of requests. A faulty line has a `fault`; so has one whose `custom_id` an earlier line has.

    Raises:
        ConfigError: The file cannot be read.
    """
    return LineReader(path, UniqueLines().read, skip_blank=True)


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """Answer to one line, in OpenAI's form."""

    number: int
    failed: bool
    content: Sequence[bytes]
    """Line of the output, without its newline, in pieces: the body of an answer may be large, and is never joined."""
    memory: AnswerMemory | None = None
    """Memory of the answer. None: it is an error, which is small, or comes from another process."""

    def pieces(self) -> Sequence[bytes]:
        """Return the line of the output."""
        return self.content

    def give_back(self) -> None:
        """Release the memory of the answer."""
        if self.memory is not None:
            self.memory.give_back()


class BatchAnswers:
    """Makes the lines of the output of one job.

    Args:
        job: Id of the job, from which those of the lines are made.
    """

    def __init__(self, job: str) -> None:
        self._job = job

    def request_id(self, line: BatchLine) -> str:
        """Return the id of the request of a line."""
        return f"{self._job}-{line.number}"

    def answered(
        self,
        line: BatchLine,
        status: int,
        body: Pieces,
        request_id: str | None = None,
        memory: AnswerMemory | None = None,
    ) -> BatchAnswer:
        """Make the answer of a line that was sent as a request.

        Args:
            line: The line.
            status: HTTP status of the answer.
            body: JSON of the answer.
            request_id: Id of the request; None: `request_id(line)`.
            memory: Memory of the answer, which belongs to the answer from now on.
        """
        named = orjson.dumps(request_id or self.request_id(line))
        before = b'{"status_code":%d,"request_id":%s,"body":' % (status, named)
        return self._answer(line, (before, *pieces_of(body), b"}"), b"null", failed=status >= 400, memory=memory)

    def refused(self, line: BatchLine, fault: Fault) -> BatchAnswer:
        """Make the answer of a line that is not sent, such as malformed JSON.

        OpenAI's clients expect `code` and `message`. `line` counts from 1, as editors do.
        """
        error = {"code": fault.code, "message": fault.message, "line": line.number + 1}
        return self._answer(line, (b"null",), orjson.dumps(error), failed=True)

    def _answer(
        self,
        line: BatchLine,
        response: Sequence[bytes],
        error: bytes,
        *,
        failed: bool,
        memory: AnswerMemory | None = None,
    ) -> BatchAnswer:
        own, custom = orjson.dumps(f"batch_req_{self.request_id(line)}"), orjson.dumps(line.custom_id)
        before, after = b'{"id":%s,"custom_id":%s,"response":' % (own, custom), b',"error":%s}' % error
        return BatchAnswer(line.number, failed, (before, *response, after), memory)
