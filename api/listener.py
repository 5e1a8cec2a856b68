"""The listening socket. It exists before anything heavy is imported, so that clients queue instead of being refused."""

from __future__ import annotations

import errno
import os
import socket

from staged_pool.stages.errors import ConfigError

BACKLOG = 1024
"""Connections that the kernel keeps waiting for us."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` and `port`.

    Returns:
        A non-blocking TCP socket; `getsockname()` says which port it got, if `port` is 0.

    Raises:
        ConfigError: The address is not ours, the port is taken, or the system does not allow it.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"host={host!r}: no such host name or address") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(_reason(error, host, port)) from error
    listener.setblocking(False)
    return listener


def _reason(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port={port}: another process already listens there on {host}; stop it, or choose another port"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port={port}: this user may not listen there; choose a port above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"host={host!r}: not an address of this machine"
    return f"host={host!r}, port={port}: cannot listen ({os.strerror(error.errno or 0)})"


def url(listener: socket.socket) -> str:
    """Where a client on this machine reaches the socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"
