"""Settings of the HTTP server: one frozen value, checked once, and the table of its flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from staged_pool.api.cors import check_origins, check_root_path
from staged_pool.api.keys import check_keys, check_tenant_header
from staged_pool.api.trace_endpoint import check_endpoint
from staged_pool.runtime.settings import BYTES, DAY_S, MEBIBYTES, check_settings, setting
from staged_pool.stages.errors import ConfigError

MAX_TIMEOUT_S: Final = float(DAY_S)
"""Longest timeout of a request in seconds. More is a mistake in the unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP server. docs/configuration.md has the same table for reading.

    Raises:
        ConfigError: A value is out of its range; the message names field, value and range.
    """

    host: str = setting(
        "127.0.0.1",
        "Address to listen on. Set 0.0.0.0 to serve other machines too.",
        group="Server",
        basic=True,
        metavar="ADDRESS",
        more="0.0.0.0 and :: mean every interface.",
    )
    port: int = setting(
        8000,
        "TCP port. 0: any free port; the log names it.",
        group="Server",
        basic=True,
        metavar="PORT",
        low=0,
        high=65_535,
    )
    unix_socket: Path | None = setting(
        None,
        "Listen on this path instead of host and port, such as /run/staged-pool.sock.",
        group="Server",
        more="User and group may connect; the rights of the folder can restrict them further.",
    )
    tls_cert: Path | None = setting(
        None,
        "PEM file of the TLS certificate and its chain. Needs --tls-key.",
        group="Access",
        basic=True,
        more="With it, every connection is TLS.",
    )
    tls_key: Path | None = setting(
        None,
        "PEM file of the private key of the certificate, without a password.",
        group="Access",
        basic=True,
    )
    tls_ca: Path | None = setting(
        None,
        "PEM file of roots; clients must send a certificate that one of these has signed.",
        group="Access",
        default_text="clients need no certificate",
    )
    quic_port: int | None = setting(
        None,
        "UDP port for HTTP/3, such as 8443. Needs --tls-cert, and the package aioquic.",
        group="Server",
        metavar="PORT",
        low=0,
        high=65_535,
        default_text="no HTTP/3",
        more="It listens on the address of --host.",
    )
    api_keys: tuple[str, ...] = setting(
        (),
        "Require this key (Authorization: Bearer) on every route but those of probes. Repeat for several.",
        group="Access",
        flag="api-key",
        metavar="KEY",
        secret=True,
        default_text="no key is required",
        more="/health, /ready and /ping stay open. Other users of the machine can see flags: prefer --api-key-file, "
        "or the variable.",
    )
    admin_api_keys: tuple[str, ...] = setting(
        (),
        "Key of the routes below /admin, which load and unload models. Repeat for several.",
        group="Access",
        flag="admin-api-key",
        metavar="KEY",
        secret=True,
        default_text="no such routes",
        more="It opens no other route, and an API key opens none of these. Prefer the variable to the flag.",
    )
    models_memory_bytes: int | None = setting(
        None,
        "Bytes of weights of all models, such as 20G. A load beyond it unloads models that were not used for longest.",
        group="Limits",
        flag="models-memory",
        metavar="BYTES",
        low=2**20,
        high=2**50,
        unit=BYTES,
        default_text="no limit",
        more="For models that POST /admin/models loads. Those given at the start are never unloaded for another one. "
        "While a model loads, its weights come on top.",
    )
    tenant_header: str | None = setting(
        None,
        "Header that names the tenant of a request, such as X-Tenant. Tenants share the device fairly.",
        group="Access",
        metavar="HEADER",
        default_text="each API key is a tenant",
        more="Use it only behind a proxy that sets the header. A client that chooses its tenant can take as many "
        "shares of the device as it likes. All requests without a header and a key are one tenant.",
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "Origin whose pages may read answers, such as https://example.org; * for all. Repeat for several.",
        group="Access",
        flag="cors-origin",
        metavar="ORIGIN",
        default_text="only the pages of this server",
        more="Applications have schemes of their own, such as chrome-extension://ID, app://obsidian.md and "
        "tauri://localhost. null stands for each page that keeps its origin secret, such as a file or a sandboxed "
        "frame: any page can become one. An allowed page of the internet also reaches a server in a private network.",
    )
    root_path: str = setting(
        "",
        "Prefix that a proxy adds to every path, such as /models.",
        group="Server",
        metavar="PATH",
        more="Requests are answered with the prefix and without.",
    )
    access_log: bool = setting(
        True,
        "Log a request.finished line for each request.",
        group="Logs",
        more="A line takes tens of microseconds of the event loop.",
    )
    log_clients: bool = setting(
        False,
        "Add the client's address to these lines. It may be personal data.",
        group="Logs",
    )
    load_header: bool = setting(
        False,
        "Tell the load in each answer, in the header endpoint-load-metrics (ORCA), for gateways that route by it.",
        group="Server",
        more="The value is JSON: requests a second, utilization 0 to 1, waiting requests. A request with the header "
        "endpoint-load-metrics-format (JSON or TEXT) gets it anyway. It costs some microseconds an answer.",
    )
    drain_lead_s: float = setting(
        0.0,
        "Seconds after SIGTERM in which /ready is 503 and requests are still accepted, before the drain begins.",
        group="Server",
        low=0,
        high=DAY_S,
        more="Behind a gateway, set it to a few intervals of its checks of /ready: the gateway then sends nothing to a "
        "server that rejects. A longer lead makes each end take longer.",
    )
    trace_endpoint: str | None = setting(
        None,
        "Send traces of requests to this OpenTelemetry collector (OTLP/HTTP), such as http://localhost:4318.",
        group="Logs",
        metavar="URL",
        default_text="no traces",
        more="Needs `pip install 'staged-pool[otel]'`. Without a path it is /v1/traces. The variables "
        "OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES count, too.",
    )
    trace_ratio: float = setting(
        0.01,
        "Part of the requests without a traceparent header that are traced, 0 to 1.",
        group="Logs",
        low=0,
        high=1,
        more="A request with one is traced if its caller's trace is sampled.",
    )
    body_limit_bytes: int = setting(
        32 * 2**20,
        "Size of one request body in MiB, such as 64. A larger one is answered 413.",
        group="Limits",
        flag="body-limit-mb",
        metavar="MIB",
        low=1,
        high=2**31,
        unit=MEBIBYTES,
        more="All bodies together share the memory that models leave; see --memory-limit.",
    )
    body_timeout_s: float = setting(
        30.0,
        "Seconds for a body to arrive; then 408.",
        group="Limits",
        low=0.001,
        high=DAY_S,
        more="A longer timeout serves slower connections, and lets slow clients hold memory longer.",
    )
    header_limit_bytes: int = setting(
        16 * 2**10,
        "Bytes of all header names and values together. More are answered 431.",
        group="Limits",
        low=256,
        high=64 * 2**10,
        has_flag=False,
    )
    header_limit: int = setting(
        100,
        "Headers of one request. More are answered 431.",
        group="Limits",
        low=1,
        high=10_000,
        has_flag=False,
    )
    head_timeout_s: float = setting(
        5.0,
        "Seconds for the head of a request, and for the first request of a connection to begin.",
        group="Limits",
        low=0.001,
        high=DAY_S,
        has_flag=False,
        more="The time of a head starts with its first byte. A longer timeout lets slow clients hold more connections.",
    )
    keep_alive_s: float = setting(
        75.0,
        "Seconds that an idle connection stays open.",
        group="Limits",
        low=0.001,
        high=DAY_S,
        more="A proxy in front should close its side earlier. Else it may send into a connection that is closing.",
    )
    write_timeout_s: float = setting(
        30.0,
        "Seconds for a client to read 64 KiB of its answer; then its connection is reset.",
        group="Limits",
        low=0.001,
        high=DAY_S,
        more="Less than 64 KiB left counts as 64 KiB. A longer timeout serves slower connections; clients that do not "
        "read then hold memory, and delay the end of the server, for longer.",
    )
    max_connections: int = setting(
        1000,
        "Connections at once. One more closes the connection that has waited longest for its client.",
        group="Limits",
        low=1,
        high=10**6,
        more="An idle connection is closed first, then one with a slow request or a slow reader. "
        "While all of them work, a few more may send what probes send. "
        "One address has at most seven times what it leaves free. Each connection takes an open file.",
    )
    max_http_requests: int = setting(
        4096,
        "HTTP requests in progress, over all connections. One more is answered 503.",
        group="Limits",
        low=1,
        high=10**6,
        more="It bounds the tasks of clients that open HTTP/2 streams and reset them.",
    )
    batch_dir: Path | None = setting(
        None,
        "Folder for the files and batches of OpenAI's batch API. Without it, /v1/files and /v1/batches are off.",
        group="Server",
        metavar="FOLDER",
        default_text="no files and batches",
        more="Batches that have not ended go on when the server starts again. One server at a time uses the folder.",
        completes="dir",
    )
    batch_dir_limit_bytes: int = setting(
        20 * 2**30,
        "Size of all files in the folder of --batch-dir, such as 50G. Beyond it, uploads are answered 413.",
        group="Limits",
        flag="batch-dir-limit",
        metavar="BYTES",
        low=2**20,
        high=2**50,
        unit=BYTES,
        more="A batch whose output has no room fails, with the results so far. A client may have seven times what it "
        "leaves free.",
    )
    auto_truncate: bool = setting(
        True,
        "Cut long texts on the routes of text-embeddings-inference, where a request does not say.",
        group="Server",
        more="Clients of these routes expect it. The routes of OpenAI and vLLM cut only where a request says so.",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        check_keys(self.api_keys)
        check_keys(self.admin_api_keys, "admin_api_key")
        if set(self.api_keys) & set(self.admin_api_keys):
            raise ConfigError("admin_api_key=(one of them): is an API key, too; operators need keys of their own")
        if self.tenant_header is not None:
            check_tenant_header(self.tenant_header)
        if self.trace_endpoint is not None:
            check_endpoint(self.trace_endpoint)
        check_origins(self.cors_origins)
        check_root_path(self.root_path)
        self._check_tls()

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
