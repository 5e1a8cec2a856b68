"""Where connections come from: the sockets that Hypercorn listens on, and how many it accepts in a turn."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from typing import Final

import sniffio
from hypercorn.config import Config as HypercornConfig
from hypercorn.config import Sockets

from staged_pool.api.config import ServerConfig
from staged_pool.api.express import Express
from staged_pool.api.listener import BACKLOG
from staged_pool.api.traffic import Traffic

ACCEPTED_AT_ONCE: Final = 16
"""Connections that are accepted in one turn of the event loop. Uvloop and trio accept one from each socket that they
listen on, and where a turn takes 15 ms, the last of 800 new clients would wait for ten seconds. asyncio's own loop
accepts as many as may wait in the kernel; where the process may open no more files, it fails as often, and says so."""


class ConnectionConfig(HypercornConfig):  # type: ignore[misc]  # Hypercorn is untyped here
    """Hypercorn's settings, and ours for its connections."""

    limits: ServerConfig
    traffic: Traffic
    tls: ssl.SSLContext | None = None
    express: Express | None = None
    """Answers what needs no protocol to be understood."""

    @property
    def ssl_enabled(self) -> bool:
        return self.tls is not None

    def create_ssl_context(self) -> ssl.SSLContext | None:
        return self.tls

    def accept_on(self, listener: socket.socket) -> None:
        """Have connections accepted in the event loop that runs, `ACCEPTED_AT_ONCE` in a turn.

        Args:
            listener: A socket that listens already. It is Hypercorn's from now on.
        """
        descriptors = [listener.detach()]
        if _accepts_many():
            self.backlog = ACCEPTED_AT_ONCE
        else:
            self.backlog = BACKLOG
            descriptors += [os.dup(descriptors[0]) for _ in range(ACCEPTED_AT_ONCE - 1)]
        self.bind = [f"fd://{each}" for each in descriptors]

    def create_sockets(self) -> Sockets:
        sockets = super().create_sockets()
        if _accepts_many():
            for some in (sockets.secure_sockets, sockets.insecure_sockets):
                some[:] = [_Listening(fileno=one.detach()) for one in some]
        return sockets


def _accepts_many() -> bool:
    """Whether the event loop that runs accepts as many connections in a turn as it is told: asyncio's own does."""
    if sniffio.current_async_library() != "asyncio":
        return False
    return isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop)


class _Listening(socket.socket):
    """A socket that listens, and is not told to again: asyncio would have no more wait in the kernel than it accepts in
    a turn."""

    def listen(self, backlog: int = 0, /) -> None:
        pass
