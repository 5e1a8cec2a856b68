"""The door of an engine replica: a TCP listener for the lines of preparers."""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import anyio
from anyio.abc import SocketAttribute, SocketStream

from staged_pool.api.http.listener import bind
from staged_pool.api.http.token_listener import TokenListener
from staged_pool.ray.object_store import ObjectStore, Received
from staged_pool.runtime.engine.front_desk import FrontDesk
from staged_pool.runtime.remote.line import FrontLine
from staged_pool.stages.log import get_logger

TOKEN_BYTES: Final = 32
GONE_S: Final = 10
"""Seconds without a sign of the other machine after which a line ends."""

log = get_logger("staged_pool.ray")


class Door(NamedTuple):
    """Address of an engine replica."""

    replica: str
    """Unique name of the replica."""
    host: str
    port: int
    token: bytes
    """Secret of the door. Without it, nothing but the end of the connection is sent."""


@asynccontextmanager
async def open_door(desk: FrontDesk, host: str, replica: str, received: Received) -> AsyncIterator[Door]:
    """Serve preparers for the length of a block.

    Args:
        desk: Takes their requests.
        host: Address of this machine within the cluster.
        replica: See `Door.replica`.
        received: Counts the blocks that preparers send through the object store.
    """
    token = secrets.token_bytes(TOKEN_BYTES)

    async def take(stream: SocketStream) -> None:
        try:
            _notice_dead_machines(stream)
        except OSError:  # it is gone already
            await anyio.aclose_forcefully(stream)
            return
        reason = await desk.serve(stream, None, ObjectStore(received))
        log.info("preparer.left", reason=reason)

    listener = bind(host, 0)
    port: int = listener.getsockname()[1]
    async with anyio.create_task_group() as serving:
        serving.start_soon(TokenListener(listener, token, take).run)
        yield Door(replica, host, port, token)
        serving.cancel_scope.cancel()


async def walk_in(line: FrontLine, door: Door) -> str:
    """Serve a line to an engine replica until it ends. Returns the reason.

    Raises:
        OSError: Nobody answers the door.
    """
    with anyio.fail_after(GONE_S):
        stream = await anyio.connect_tcp(door.host, door.port)
    async with stream:
        _notice_dead_machines(stream)
        await stream.send(door.token)
        return await line.run(stream, None, ObjectStore())


def _notice_dead_machines(stream: SocketStream) -> None:
    """Let a connection end if the other machine is gone without a word."""
    raw = stream.extra(SocketAttribute.raw_socket)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, GONE_S // 2)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, GONE_S // 2)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_S * 1000)
