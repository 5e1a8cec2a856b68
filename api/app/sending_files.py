"""Answers that are files, read while they are sent."""

from __future__ import annotations

from typing import Final

import anyio
import anyio.to_thread

from staged_pool.api.app.call import Answer
from staged_pool.api.asgi import Headers, Scope, Send

PIECE_BYTES: Final = 2**18
"""Bytes of a file in memory at once."""


async def send_file(answer: Answer, headers: Headers, scope: Scope, send: Send) -> None:
    """Send an answer whose body is a file, and close the file. It waits for a client that reads slowly."""
    if answer.file is None:
        raise RuntimeError("the answer has no file")
    file, left = answer.file.file, answer.file.size
    try:
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        while left and scope["method"] != "HEAD":
            piece = await anyio.to_thread.run_sync(file.read, min(left, PIECE_BYTES))
            if not piece:
                raise RuntimeError("the file is shorter than it was")  # the connection ends, so the client notices
            left -= len(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": bool(left)})
        if left or not answer.file.size:
            await send({"type": "http.response.body", "body": b""})
    finally:
        file.close()
