"""The command line. Only it and what it runs read the environment, configure logging and end the process.

`serve` listens before it imports what is heavy: a client that comes early waits for an answer, and is not refused.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from staged_pool.api.commands import one_shot as oneshot
from staged_pool.api.commands.flags import (
    AllowPickle,
    AttentionFlag,
    BackendFlag,
    CudaGraphs,
    Deterministic,
    DeviceFlag,
    DTypeFlag,
    ForwardWorkers,
    ImageDraft,
    ImagePathFlag,
    LogFormatFlag,
    LogLevelFlag,
    Matryoshka,
    MaxImagePixels,
    Models,
    Offline,
    Revision,
    ScoreTemplate,
    ScoreTokens,
    SplitLongInputs,
    TaskFlag,
    TorchThreads,
    TrustRemoteCode,
    TuneFlag,
    flag,
    read_bytes,
)
from staged_pool.api.commands.process import errors_in_flag_words, prepare_environment, run
from staged_pool.api.config import ServerConfig
from staged_pool.api.http.listener import bind, bind_udp, bind_unix
from staged_pool.api.http.tls import server_context
from staged_pool.api.keys import read_keys
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.find import check_model
from staged_pool.stages.errors import ConfigError

_DEFAULT = EngineConfig()
_SERVER = ServerConfig()

main = typer.Typer(
    help="Pooling models through four explicit, bounded stages: parse, preprocess, batch, postprocess.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": 110},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(importlib.metadata.version("staged-pool"))
        raise typer.Exit


@main.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@main.command()
def serve(
    *,
    host: Annotated[
        str, flag("--host", "Server", "Address to listen on. 0.0.0.0 serves other machines too.")
    ] = _SERVER.host,
    port: Annotated[int, flag("--port", "Server", "TCP port. 0: any free one; the log says which.")] = _SERVER.port,
    unix_socket: Annotated[
        Path | None,
        flag("--unix-socket", "Server", "Listen on this path instead of host and port. User and group may connect."),
    ] = None,
    quic_port: Annotated[
        int | None,
        flag("--quic-port", "Server", "Serve HTTP/3 too, on this UDP port. Needs a certificate, and aioquic."),
    ] = None,
    root_path: Annotated[
        str, flag("--root-path", "Server", "What a proxy puts before every path, such as /models.")
    ] = _SERVER.root_path,
    backend: BackendFlag = "asyncio",
    api_key: Annotated[
        list[str] | None,
        flag(
            "--api-key",
            "Access",
            "Ask for a key (Authorization: Bearer) on every route but /health, /ready and /ping. Repeat it for "
            "several. Other users of the machine see flags: prefer the variable, or --api-key-file.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, flag("--api-key-file", "Access", "The same, one key a line; # begins a comment.")
    ] = None,
    tenant_header: Annotated[
        str | None,
        flag(
            "--tenant-header",
            "Access",
            "A header that says whose a request is: tenants share the device fairly. Only behind a proxy that sets it. "
            "Default: each API key is a tenant.",
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        flag(
            "--cors-origin",
            "Access",
            "Let pages of this origin (https://example.org; * for all) read answers. Repeat it for several.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, flag("--tls-cert", "Access", "Serve over TLS: PEM file of the certificate and its chain.")
    ] = None,
    tls_key: Annotated[Path | None, flag("--tls-key", "Access", "PEM file of its private key.")] = None,
    tls_ca: Annotated[
        Path | None,
        flag("--tls-ca", "Access", "Ask clients for a certificate that comes from a root in this PEM file."),
    ] = None,
    model: Models = None,
    revision: Revision = None,
    offline: Offline = False,
    served_name: Annotated[
        str | None,
        flag("--served-name", "Model", "What requests and answers call the model. Default: the folder's last part."),
    ] = None,
    task: TaskFlag = _DEFAULT.task,
    score_template: ScoreTemplate = None,
    score_tokens: ScoreTokens = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
    device: DeviceFlag = _DEFAULT.device,
    dtype: DTypeFlag = _DEFAULT.dtype,
    tune: TuneFlag = _DEFAULT.tune,
    deterministic: Deterministic = False,
    cuda_graphs: CudaGraphs = _DEFAULT.cuda_graphs,
    attention: AttentionFlag = _DEFAULT.attention,
    matryoshka: Matryoshka = None,
    split_long_inputs: SplitLongInputs = False,
    torch_threads: TorchThreads = None,
    forward_workers: ForwardWorkers = None,
    image_path: ImagePathFlag = _DEFAULT.image_path,
    image_draft: ImageDraft = _DEFAULT.image_draft,
    image_cache_mb: Annotated[
        int,
        flag(
            "--image-cache-mb",
            "Images",
            "Memory for prepared images, in 10^6 bytes: one that comes again is not decoded again. 0: none is kept.",
        ),
    ] = _DEFAULT.image_cache_mb,
    max_image_pixels: MaxImagePixels = _DEFAULT.max_image_pixels,
    max_image_bytes: Annotated[
        int, flag("--max-image-bytes", "Images", "Of one encoded image, sent or fetched; a larger one is refused.")
    ] = _DEFAULT.max_image_bytes,
    image_preprocess_limit: Annotated[
        int | None,
        flag(
            "--image-preprocess-limit",
            "Images",
            "Preprocess calls for images at once, each in a thread. Default: one for each core, from 2 to 16; more "
            "get nothing more done.",
        ),
    ] = _DEFAULT.image_preprocess_limit,
    allow_media_domain: Annotated[
        list[str] | None,
        flag(
            "--allow-media-domain",
            "Images",
            "Fetch images from this host and all below it; * for every host with a public address. Repeat it for "
            "several. An address that is not public is asked only if it is given here itself, such as 10.0.0.5. "
            "Without: URLs are refused.",
        ),
    ] = None,
    allow_media_path: Annotated[
        str | None,
        flag("--allow-media-path", "Images", "A folder; requests may name the files in it by file:// URLs."),
    ] = _DEFAULT.allow_media_path,
    media_limit: Annotated[
        int, flag("--media-limit", "Images", "Fetches at once, and as many reads of files.")
    ] = _DEFAULT.media_limit,
    media_timeout: Annotated[
        float,
        flag(
            "--media-timeout", "Images", "Seconds that one fetch, with all redirects, or one file may take; then 504."
        ),
    ] = _DEFAULT.media_timeout_s,
    preprocess_limit: Annotated[
        int,
        flag(
            "--preprocess-limit",
            "Limits",
            "Preprocess calls at once, each in a thread. More help slow inputs to overtake each other, until the "
            "threads take the device's cores away.",
        ),
    ] = _DEFAULT.preprocess_limit,
    max_batch_tokens: Annotated[
        int | None,
        flag(
            "--max-batch-tokens",
            "Limits",
            "Tokens of one batch at most. More keep the device busier; each takes longer, and so does the wait of "
            "whoever comes next. Default, by how much waits: on a CPU 512 to 1024; on a GPU 4096 to 16384, or what "
            "fits into its memory.",
        ),
    ] = _DEFAULT.max_batch_tokens,
    target_batch: Annotated[
        float | None,
        flag(
            "--target-batch",
            "Limits",
            "Seconds that the forward of a batch is to take at most: batches have as many tokens as keep to it, up to "
            "--max-batch-tokens. Shorter lets whoever comes next wait less, at the price of throughput. Default: none.",
        ),
    ] = _DEFAULT.target_batch_s,
    max_batch_items: Annotated[
        int, flag("--max-batch-items", "Limits", "Items of one batch. Bounds a batch of very short texts.")
    ] = _DEFAULT.max_batch_items,
    coalesce: Annotated[
        bool,
        flag(
            "--coalesce/--no-coalesce",
            "Results",
            "Send inputs that are the same, and inside at the same time, through the device once, for all who asked.",
        ),
    ] = _DEFAULT.coalesce,
    share_between_tenants: Annotated[
        bool,
        flag(
            "--share-between-tenants",
            "Results",
            "Let tenants share the results and prepared images that are kept: by the time of an answer a tenant can "
            "then find out what others have asked. A request's cache_salt keeps it apart either way.",
        ),
    ] = _DEFAULT.share_between_tenants,
    result_cache_mb: Annotated[
        int,
        flag(
            "--result-cache-mb",
            "Results",
            "Memory for results, in 10^6 bytes: an input that comes again does not go through the device again. "
            "0: none is kept.",
        ),
    ] = _DEFAULT.result_cache_mb,
    max_requests: Annotated[
        int,
        flag(
            "--max-requests",
            "Limits",
            "Requests inside at once; one more is refused with 429. More let the wait under load grow longer.",
        ),
    ] = _DEFAULT.max_requests,
    max_items: Annotated[
        int,
        flag(
            "--max-items",
            "Limits",
            "Items inside at once, over all requests; a request beyond that is refused with 429.",
        ),
    ] = _DEFAULT.max_items,
    body_limit_mb: Annotated[
        float, flag("--body-limit-mb", "Limits", "One request's body in MiB; a larger one is answered 413.")
    ] = _SERVER.body_limit_bytes / 2**20,
    body_timeout: Annotated[
        float,
        flag(
            "--body-timeout",
            "Limits",
            "Seconds that a body may take to arrive; then 408. Longer lets slow clients hold memory longer.",
        ),
    ] = _SERVER.body_timeout_s,
    write_timeout: Annotated[
        float,
        flag(
            "--write-timeout",
            "Limits",
            "Seconds that a client may take to read 64 KiB of its answer; then its connection is reset.",
        ),
    ] = _SERVER.write_timeout_s,
    max_connections: Annotated[
        int,
        flag(
            "--max-connections",
            "Limits",
            "Connections at once; one more has the one closed that waits longest for its client.",
        ),
    ] = _SERVER.max_connections,
    max_http_requests: Annotated[
        int,
        flag(
            "--max-http-requests",
            "Limits",
            "HTTP requests being handled at once, over all connections; one more is answered 503.",
        ),
    ] = _SERVER.max_http_requests,
    memory_limit: Annotated[
        str | None,
        flag(
            "--memory-limit",
            "Limits",
            "Memory that the process may take, such as 4G or 3500M. What models and caches leave of it is divided "
            "among bodies, images in work and answers; near it less is done at once, and requests are rejected. "
            "Default: the limit of the container, or else what the machine has left at the start.",
        ),
    ] = None,
    target_delay: Annotated[
        float,
        flag(
            "--target-delay",
            "Limits",
            "Seconds; a request that would wait longer for its answer is refused with 429. Shorter keeps every "
            "accepted request quick, and refuses more of a burst.",
        ),
    ] = _DEFAULT.target_delay_s,
    auto_truncate: Annotated[
        bool,
        flag(
            "--auto-truncate/--no-auto-truncate",
            "Server",
            "Whether the routes of text-embeddings-inference cut texts that are too long where a request does not say.",
        ),
    ] = _SERVER.auto_truncate,
    drain_timeout: Annotated[
        float,
        flag(
            "--drain-timeout",
            "Limits",
            "Seconds to finish what is inside after SIGTERM; the rest fails with 503. Keep it below what the "
            "supervisor allows.",
        ),
    ] = _DEFAULT.drain_timeout_s,
    log_level: LogLevelFlag = "info",
    log_format: LogFormatFlag = "auto",
    access_log: Annotated[
        bool, flag("--access-log/--no-access-log", "Logs", "A `request.finished` line for each request.")
    ] = _SERVER.access_log,
    log_clients: Annotated[
        bool, flag("--log-clients", "Logs", "Put clients' addresses into these lines; they may be personal data.")
    ] = _SERVER.log_clients,
) -> None:
    """Serve a model over HTTP.

    POST /v1/embeddings, /pooling, /score, /rerank, /classify, /classify_tokens, /tokenize, /detokenize;
    GET /v1/models, /version, /health, /ready, /load, /metrics, /stages.
    """
    with errors_in_flag_words():
        body_limit_bytes = _mebibytes("body_limit_mb", body_limit_mb)
        server = ServerConfig(
            host=host,
            port=port,
            unix_socket=unix_socket,
            quic_port=quic_port,
            root_path=root_path.rstrip("/"),
            api_keys=(*(api_key or ()), *(read_keys(api_key_file) if api_key_file else ())),
            tenant_header=tenant_header,
            cors_origins=tuple(cors_origin or ()),
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_ca=tls_ca,
            access_log=access_log,
            log_clients=log_clients,
            body_limit_bytes=body_limit_bytes,
            body_timeout_s=body_timeout,
            write_timeout_s=write_timeout,
            max_connections=max_connections,
            max_http_requests=max_http_requests,
            auto_truncate=auto_truncate,
        )
        first = EngineConfig(
            revision=revision,
            offline=offline,
            task=task,
            score_template=score_template,
            score_tokens=score_tokens,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
            matryoshka=matryoshka,
            split_long_inputs=split_long_inputs,
            device=device,
            dtype=dtype,
            tune=tune,
            deterministic=deterministic,
            cuda_graphs=cuda_graphs,
            attention=attention,
            torch_threads=torch_threads,
            forward_workers=forward_workers,
            preprocess_limit=preprocess_limit,
            image_preprocess_limit=image_preprocess_limit,
            image_path=image_path,
            image_draft=image_draft,
            image_cache_mb=image_cache_mb,
            max_image_pixels=max_image_pixels,
            max_image_bytes=max_image_bytes,
            allow_media_domains=tuple(allow_media_domain or ()),
            allow_media_path=allow_media_path,
            media_limit=media_limit,
            media_timeout_s=media_timeout,
            max_batch_tokens=max_batch_tokens,
            target_batch_s=target_batch,
            max_batch_items=max_batch_items,
            coalesce=coalesce,
            share_between_tenants=share_between_tenants,
            result_cache_mb=result_cache_mb,
            max_requests=max_requests,
            max_items=max_items,
            memory_limit_bytes=None if memory_limit is None else read_bytes("memory_limit_bytes", memory_limit),
            target_delay_s=target_delay,
            drain_timeout_s=drain_timeout,
        )
        engines = [replace(first, model=source, served_name=name) for name, source in _named(model, served_name)]
        for engine in engines:
            check_model(engine)
        server_context(server)  # before anything heavy: its files may be wrong
        listener = bind(server.host, server.port) if unix_socket is None else bind_unix(unix_socket)
        if quic_port is not None:
            from staged_pool.api.http.http3.protocol import check_installed

            check_installed()
        quic_listener = None if quic_port is None else bind_udp(server.host, quic_port)
        prepare_environment(offline=offline)

        from staged_pool.api.commands import logs
        from staged_pool.api.http.server import serve as run_server

        logs.configure(log_level, log_format)
        run(backend, lambda: run_server(server, engines, listener, quic_listener))


for command in (oneshot.embed, oneshot.score, oneshot.classify, oneshot.check):
    main.command()(command)


def _named(models: list[str] | None, served_name: str | None) -> list[tuple[str | None, str | None]]:
    """The served name, where one is given, and the source of each model: `name=source`, or a source alone.

    Raises:
        ConfigError: `served_name` is given, and it is not clear for which model.
    """
    named: list[tuple[str | None, str | None]] = []
    for model in models or []:
        name, _, source = model.rpartition("=")
        named.append((None, model) if not name or Path(model).exists() else (name, source))
    if served_name is None:
        return named or [(None, None)]
    if len(named) > 1 or any(name for name, _ in named):
        raise ConfigError(f"served_name={served_name!r}: several models, or a named one: write --model name=folder")
    return [(served_name, named[0][1] if named else None)]


def _mebibytes(name: str, value: float) -> int:
    if not 0.001 <= value <= 2048:
        raise ConfigError(f"{name}={value:g}: must be between 0.001 and 2048")
    return int(value * 2**20)
