"""Address of the server under load, and the sockets to it."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import anyio.abc

from staged_pool.stages.errors import ConfigError

EXAMPLE = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a server; `prefix` is the part of its URL in front of the routes."""

    host: str
    port: int
    prefix: str = ""
    tls: ssl.SSLContext | None = None

    @classmethod
    def of(cls, url: str, ca_file: Path | None = None) -> Address:
        """Read a URL. A `/v1` at its end is left out, because the routes begin with it.

        Args:
            url: Such as `http://127.0.0.1:8000`.
            ca_file: Certificates of authorities to trust. None: those of this machine.

        Raises:
            ConfigError: It is no address of HTTP, or the certificates cannot be read.
        """
        wrong = ConfigError(f"URL {url!r}: must be an http or https address, such as {EXAMPLE}")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise wrong from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise wrong
        if parts.username is not None or not url.isascii() or not url.isprintable() or " " in url:
            raise wrong
        tls = _context(ca_file) if parts.scheme == "https" else None
        if ca_file is not None and tls is None:
            raise ConfigError(f"ca_file={str(ca_file)!r}: only https has certificates, and {url} is http")
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), prefix, tls)

    @property
    def authority(self) -> str:
        """Value of the `Host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"

    async def connect(self) -> anyio.abc.ByteStream:
        """Open a connection.

        Raises:
            OSError: Nobody listens there, or the name is unknown.
            ssl.SSLError: The handshake failed.
        """
        if self.tls is None:
            return await anyio.connect_tcp(self.host, self.port)
        return await anyio.connect_tcp(
            self.host, self.port, ssl_context=self.tls, tls_hostname=self.host, tls_standard_compatible=False
        )


def _context(ca_file: Path | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ca_file={str(ca_file)!r}: cannot be read as certificates in PEM: {error}") from error
    context.set_alpn_protocols(["http/1.1"])
    return context
