"""TLS settings of the server, checked before it listens."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

from staged_pool.api.config import ServerConfig
from staged_pool.stages.errors import ConfigError

PROTOCOLS: Final = ("h2", "http/1.1")
"""Protocols offered to clients, the preferred one first (RFC 7301)."""


def server_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the TLS settings of all connections: TLS 1.2 and newer, with OpenSSL's default ciphers.

    Returns:
        None if the server has no certificate.

    Raises:
        ConfigError: A file cannot be read, has the wrong content, or the key does not match the certificate.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION  # RFC 9113, section 9.2.1
    context.set_alpn_protocols(PROTOCOLS)
    _check_readable("tls_cert", config.tls_cert)
    _check_readable("tls_key", config.tls_key)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_no_password)
    except (ssl.SSLError, _Password) as error:
        raise ConfigError(f"tls_key={str(config.tls_key)!r}: {_reason(error)}") from None
    if config.tls_ca is not None:
        _check_readable("tls_ca", config.tls_ca)
        try:
            context.load_verify_locations(config.tls_ca)
        except ssl.SSLError:
            raise ConfigError(f"tls_ca={str(config.tls_ca)!r}: has no certificate in PEM form") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class _Password(Exception):
    """The private key has a password."""


def _no_password() -> str:
    raise _Password  # without this, OpenSSL would ask on the terminal


def _check_readable(field: str, path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"{field}={str(path)!r}: cannot be read ({error.strerror})") from None


def _reason(error: Exception) -> str:
    if isinstance(error, _Password):
        return "is locked by a password; store it without one, readable by this user alone"
    if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
        return "is not the key of tls_cert"
    return "tls_cert has no certificate in PEM form, or this file has no key in PEM form"
