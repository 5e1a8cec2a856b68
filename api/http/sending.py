"""Sending to one client, which must keep reading."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import anyio

from staged_pool.api.http.protocol.hypercorn_protocols import SEND_CHUNK_BYTES
from staged_pool.api.http.transports import Transport
from staged_pool.api.limits.server_state import ServerState
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.api")

LATE_S: Final = 0.1
"""Seconds of event loop lag beyond which a write timeout is not the client's fault."""


async def send_all(transport: Transport, data: bytes, server_state: ServerState, timeout_s: float) -> bool:
    """Send data; a connection whose client does not read is reset.

    Args:
        transport: Transport of the connection; no other call sends on it meanwhile.
        data: Bytes to send.
        server_state: Shortens the timeout when the server shuts down.
        timeout_s: Seconds within which the client must read each piece of `SEND_CHUNK_BYTES`.

    Returns:
        False if the connection was reset, or either side has closed it.
    """
    pieces = memoryview(data)
    for first in range(0, len(data), SEND_CHUNK_BYTES):
        send: Callable[[], Awaitable[None]] = partial(transport.send, pieces[first : first + SEND_CHUNK_BYTES])
        left_s = timeout_s
        while (late_s := await _sent_within(transport, send, server_state, left_s)) is not None:
            if late_s <= LATE_S:
                return False
            send, left_s = transport.send_rest, late_s  # the event loop was blocked: the client may have read
    return True


async def _sent_within(
    transport: Transport, send: Callable[[], Awaitable[None]], server_state: ServerState, timeout_s: float
) -> float | None:
    """Send a piece, or else close. None: it is sent; else the seconds by which the event loop noticed too late."""
    with server_state.timeout(timeout_s) as timeout:
        try:
            await send()
        except OSError:
            return 0.0
    if not timeout.cancelled_caught:
        return None
    late_s = anyio.current_time() - timeout.deadline
    if late_s <= LATE_S:
        log.info("connection.cut_off", reason="its client does not read the answer")
        transport.cut()
    return late_s
