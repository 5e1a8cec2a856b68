"""An upload: a form (multipart/form-data) that is read in pieces, and whose file goes to the disk as it arrives."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import anyio
import anyio.to_thread
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from staged_pool.api import status
from staged_pool.api.batches.folder import Folder
from staged_pool.api.bulk.files import write_all
from staged_pool.api.limits.uploads import FILE_BYTES
from staged_pool.api.status import HttpError
from staged_pool.api.wire.forms import boundary_of, form_text, not_a_form
from staged_pool.runtime.memory.budget import Holding
from staged_pool.stages.errors import InvalidInput, shortened

GATHERED_BYTES: Final = 2**18
"""Bytes of the body that a thread parses and writes at once."""

_MOST_PARTS: Final = 16
_FIELD_BYTES: Final = 1024
"""Maximum bytes of a field that is no file."""

_NAME_BYTES: Final = 255
"""Maximum bytes of the name of a file."""


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A complete upload, whose file is synced to the disk."""

    path: Path
    size: int
    """Bytes of the file."""
    filename: str
    fields: Mapping[str, str]


async def receive_upload(
    folder: Folder,
    content_type: bytes,
    next_piece: Callable[[], Awaitable[bytes | None]],
    held: Holding,
    limiter: anyio.CapacityLimiter,
) -> Uploaded:
    """Receive a form with one file. The file is removed if anything fails, the client leaves, or it is cancelled.

    Args:
        folder: Folder that gets the file.
        content_type: Header of the form.
        next_piece: Returns the next piece of the form; None at its end.
        held: Counts the bytes on the disk.
        limiter: Limiter of the threads that parse and write.

    Raises:
        InvalidInput: The body is no form with one file.
        HttpError: The file, or all files together, are too large.
    """
    if parse_options_header(content_type)[0] != b"multipart/form-data":
        raise HttpError(status.UNSUPPORTED_MEDIA, "Unsupported Media Type: an upload is 'multipart/form-data'")
    boundary = boundary_of(content_type)
    path, file = await anyio.to_thread.run_sync(folder.new_upload, limiter=limiter)
    form = _Form(boundary, file)
    gathered = bytearray()
    try:
        while (piece := await next_piece()) is not None:
            if not held.take(len(piece)):
                message = "The folder of files has no room for this one; delete files, or raise --batch-dir-limit"
                raise HttpError(status.STORAGE_FULL, message)
            gathered += piece
            if len(gathered) >= GATHERED_BYTES:
                full, gathered = gathered, bytearray()
                await anyio.to_thread.run_sync(form.feed, full, limiter=limiter)
        await anyio.to_thread.run_sync(form.end, gathered, limiter=limiter)
        held.set(form.size)
        return Uploaded(path, form.size, form.filename, form.fields)
    except BaseException:
        await drop_upload(path, limiter)
        raise
    finally:
        file.close()  # unbuffered: it waits for nothing


async def drop_upload(path: Path, limiter: anyio.CapacityLimiter) -> None:
    """Remove the file of an upload that has failed, whose error goes on. The next start removes one that stays."""
    with anyio.CancelScope(shield=True), suppress(OSError):
        await anyio.to_thread.run_sync(path.unlink, limiter=limiter)


class _Form:
    """Parser of one form. Its file is written to `file`. Methods block, and run one at a time."""

    def __init__(self, boundary: bytes, file: BinaryIO) -> None:
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.size = 0
        """Bytes of the file so far."""
        self._file = file
        self._has_file = False
        self._in_file = False
        self._ended = False
        self._parts = 0
        self._header = self._value = b""
        self._disposition = b""
        self._name = ""
        self._field = b""
        self._content = bytearray()
        """Bytes of the file that are parsed and not yet written."""
        self._parser = MultipartParser(boundary, self._callbacks())

    def feed(self, data: bytes | bytearray) -> None:
        """Parse some bytes of the body, and write those of the file."""
        try:
            self._parser.write(bytes(data))
        except FormParserError:
            raise not_a_form("a part or its headers are malformed or too long") from None
        write_all(self._file, memoryview(self._content))  # at once: the parser may find thousands of pieces
        self._content = bytearray()

    def end(self, data: bytes | bytearray) -> None:
        """Parse the last bytes, and sync the file."""
        self.feed(data)
        if not self._ended:
            raise not_a_form("it ends before its last boundary")
        if not self._has_file:
            raise InvalidInput("file: this part is required, with a file name", param="file")
        os.fsync(self._file.fileno())

    def _callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._add_header,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_content,
            "on_part_data": self._add_content,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise InvalidInput(f"The form has more than {_MOST_PARTS} parts")
        self._disposition = self._field = b""
        self._in_file = False

    def _add_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.strip().lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _begin_content(self) -> None:
        kind, options = parse_options_header(self._disposition)
        if kind.lower() != b"form-data" or b"name" not in options:
            raise not_a_form("a part has no name")
        self._name = form_text(options[b"name"], "the name of a part")
        if b"filename" not in options:
            return
        if self._name != "file" or self._has_file:
            raise InvalidInput("A form of an upload has one file, in the part `file`", param="file")
        self._in_file = self._has_file = True
        if len(options[b"filename"]) > _NAME_BYTES:
            raise InvalidInput(f"file: its name is longer than {_NAME_BYTES} bytes", param="file")
        self.filename = form_text(options[b"filename"], "the name of the file")

    def _add_content(self, data: bytes, start: int, end: int) -> None:
        if not self._in_file:
            self._field += data[start:end]
            if len(self._field) > _FIELD_BYTES:
                name = shortened(self._name)
                raise InvalidInput(
                    f"{name}: longer than {_FIELD_BYTES} bytes; is it a file without a name?", param=name
                )
            return
        self.size += end - start
        if self.size > FILE_BYTES:
            raise HttpError(status.BODY_TOO_LARGE, f"The file is larger than the limit of {FILE_BYTES} bytes")
        self._content += memoryview(data)[start:end]

    def _end_part(self) -> None:
        if self._in_file:
            return
        if self._name in self.fields:
            raise InvalidInput(f"{shortened(self._name)}: this field is in the form twice")
        self.fields[self._name] = form_text(self._field, self._name)

    def _end(self) -> None:
        self._ended = True
