"""Listening sockets, opened before anything heavy is imported: early clients queue instead of failing."""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from staged_pool.stages.errors import ConfigError

BACKLOG = 1024
"""Connections that the kernel queues until they are accepted."""


SOCKET_MASK: Final = 0o117
"""Permission mask of a Unix socket: its user and group may connect."""


def bind_udp(host: str, port: int) -> socket.socket:
    """Open a UDP socket on `host` and `port`.

    Raises:
        ConfigError: As for `bind`.
    """
    return _bound(host, port, socket.SOCK_DGRAM)


def bind(host: str, port: int) -> socket.socket:
    """Open a socket that listens on `host` and `port`.

    Returns:
        A non-blocking TCP socket; with `port` 0, `getsockname()` has the port that was chosen.

    Raises:
        ConfigError: The address is not of this machine, the port is taken, or the system does not allow it.
    """
    return _bound(host, port, socket.SOCK_STREAM)


def _bound(host: str, port: int, type_: socket.SocketKind) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=type_, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            f"host={host!r}: no such host name or address; 127.0.0.1 is this machine alone, and 0.0.0.0 all"
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        if type_ == socket.SOCK_STREAM:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        if type_ == socket.SOCK_STREAM:
            listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(_reason(error, host, port)) from error
    listener.setblocking(False)
    return listener


def bind_unix(path: Path) -> socket.socket:
    """Open a Unix socket that listens on a path, for clients on this machine.

    A socket file of a server that has ended is replaced. Call this before any thread starts: files that a thread
    creates meanwhile would get the permissions of the socket.

    Returns:
        A non-blocking Unix socket.

    Raises:
        ConfigError: Another process listens there, another kind of file is there, or the path cannot be used.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        mask = os.umask(SOCKET_MASK)  # with chmod() afterwards, any user could connect first
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise _in_use(path) from error
        reason = os.strerror(error.errno) if error.errno else "it is too long"
        raise ConfigError(f"unix_socket={str(path)!r}: cannot listen ({reason})") from error
    except ConfigError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"unix_socket={str(path)!r}: a file that is no socket is there; name another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:  # no process listens
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:  # a process does, and its queue is full
            pass
    raise _in_use(path)


def _in_use(path: Path) -> ConfigError:
    return ConfigError(f"unix_socket={str(path)!r}: another process already listens there; stop it first")


class SocketFile:
    """File of a listening Unix socket, removed when the server ends.

    Args:
        listener: Any listening socket; one over TCP has no file to remove.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._path = Path(listener.getsockname()) if listener.family == socket.AF_UNIX else None
        self._made = self._identity()

    def remove(self) -> None:
        """Remove the file, unless another server has replaced it."""
        if self._path is not None and self._made is not None and self._identity() == self._made:
            with suppress(OSError):
                self._path.unlink()

    def _identity(self) -> tuple[int, int] | None:
        if self._path is None:
            return None
        try:
            found = self._path.lstat()
        except OSError:
            return None
        return found.st_dev, found.st_ino


def _reason(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port={port}: another process already listens there on {host}; stop it, or choose another port"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port={port}: this user may not listen there; choose a port above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"host={host!r}: not an address of this machine"
    return f"host={host!r}, port={port}: cannot listen ({os.strerror(error.errno or 0)})"


def url(listener: socket.socket, *, tls: bool = False) -> str:
    """Return the URL at which clients on this machine reach the socket."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    scheme = "https" if tls else "http"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"{scheme}://{host}:{port}"
