"""How the HTTP server is set up: one frozen value, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from staged_pool.api.cors import check_origins, check_root_path
from staged_pool.api.keys import check_keys, check_tenant_header
from staged_pool.stages.errors import ConfigError

MAX_TIMEOUT_S: Final = 86_400.0
"""Longest timeout of a request: a day. More is a mistake in the unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP server.

    Raises:
        ConfigError: A value is out of its range; the message names field, value and range.
    """

    host: str = "127.0.0.1"
    """Address or name to listen on. `0.0.0.0` and `::` mean every interface."""

    port: int = 8000
    """TCP port. 0: any free one; the log says which."""

    unix_socket: Path | None = None
    """Path of a Unix socket to listen on instead of `host` and `port`. Who may connect is what the rights of its folder
    say: the socket itself lets its user and group in."""

    tls_cert: Path | None = None
    """PEM file of the server's certificate and those between it and the root. Given, everything is TLS."""

    tls_key: Path | None = None
    """PEM file of the certificate's private key, without a password."""

    tls_ca: Path | None = None
    """PEM file of the roots that clients' certificates must come from. None: clients need none."""

    quic_port: int | None = None
    """UDP port of HTTP/3, on the address of `host`. None: no HTTP/3."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Requests must bring one of them, but for those of probes. Empty: everyone may ask."""

    tenant_header: str | None = None
    """A header that says whose a request is, such as `X-Tenant`: tenants share the device fairly. Only behind a proxy
    that sets it: a client that may choose its tenant has as many parts of the device as it likes. None, and where a
    request has none: each API key is a tenant, and all requests without a key are one."""

    cors_origins: tuple[str, ...] = ()
    """Origins of the pages in browsers that may read answers, such as `https://example.org`; `*` for all. Empty: the
    pages of this server alone."""

    root_path: str = ""
    """What a proxy puts before every path, such as `/models`. Requests are answered with it and without."""

    access_log: bool = True
    """Whether each request has its `request.finished` line. A line costs the event loop some 50 microseconds."""

    log_clients: bool = False
    """Whether that line has the client's address, which in many places is personal data."""

    body_limit_bytes: int = 32 * 2**20
    """One request's body at most; a longer one is answered 413 and never held. All bodies together have a part of the
    memory that models leave (`EngineConfig.memory_limit_bytes`)."""

    body_timeout_s: float = 30.0
    """How long a body may take to arrive; then 408. Longer serves slower lines, and lets slow clients hold memory
    longer."""

    header_limit_bytes: int = 16 * 2**10
    """Names and values of all headers together; more are answered 431."""

    header_limit: int = 100
    """Headers of one request; more are answered 431."""

    head_timeout_s: float = 5.0
    """How long the head of a request may take, from its first byte, and the first request of a connection to begin.
    Longer lets slow clients hold more connections."""

    keep_alive_s: float = 75.0
    """How long an idle connection stays open. A proxy in front should close its side earlier, or it may send into a
    connection that is being closed."""

    write_timeout_s: float = 30.0
    """How long a client may take to read 64 KiB of its answer, or what is left of it; then the connection is reset.
    Longer serves slower lines, and lets clients that do not read hold memory, and the server's end, longer."""

    max_connections: int = 1000
    """Connections at once. One more has the one closed that has waited longest for its client: an idle one, else one
    whose request is slow to arrive or whose answer is slow to be read. Where all are at work, a few more may ask what
    probes ask. One address has seven times what it leaves free at most. Each takes one of the process's open files."""

    max_http_requests: int = 4096
    """HTTP requests being handled at once, over all connections; one more is answered 503. A client that opens HTTP/2
    streams and resets them can make so many tasks, and not more."""

    auto_truncate: bool = True
    """Whether the routes of text-embeddings-inference cut texts that are too long where a request does not say. Its
    clients expect that; the routes of OpenAI and vLLM never do it unasked."""

    def __post_init__(self) -> None:
        self._check("port", 0, 65_535)
        if self.quic_port is not None:
            self._check("quic_port", 0, 65_535)
        check_keys(self.api_keys)
        if self.tenant_header is not None:
            check_tenant_header(self.tenant_header)
        check_origins(self.cors_origins)
        check_root_path(self.root_path)
        self._check_tls()
        self._check("body_limit_bytes", 1, 2**31)
        self._check("body_timeout_s", 0.001, 86_400)
        self._check("header_limit_bytes", 256, 64 * 2**10)
        self._check("header_limit", 1, 10_000)
        self._check("head_timeout_s", 0.001, 86_400)
        self._check("keep_alive_s", 0.001, 86_400)
        self._check("write_timeout_s", 0.001, 86_400)
        self._check("max_connections", 1, 10**6)
        self._check("max_http_requests", 1, 10**6)

    def _check_tls(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_cert"
            raise ConfigError(f"{missing}=None: TLS needs a certificate and its key")
        if self.tls_ca is not None and self.tls_cert is None:
            raise ConfigError("tls_cert=None: certificates of clients are asked for over TLS only")
        if self.quic_port is not None and self.tls_cert is None:
            raise ConfigError("tls_cert=None: HTTP/3 is never without TLS")
        if self.quic_port is not None and self.tls_ca is not None:
            raise ConfigError(
                f"quic_port={self.quic_port}: HTTP/3 does not ask clients for certificates, as tls_ca wants"
            )
        if self.quic_port is not None and self.unix_socket is not None:
            raise ConfigError(f"quic_port={self.quic_port}: not together with a Unix socket")

    def _check(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            raise ConfigError(f"{name}={value!r}: must be between {low} and {high}")
