"""The command line. The only module that reads the environment, configures logging and ends the process.

`serve` listens before it imports what is heavy: a client that comes early waits for an answer, and is not refused.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final, Literal, NoReturn, TypeAlias

import typer

from staged_pool.api.config import ServerConfig
from staged_pool.api.listener import bind
from staged_pool.runtime.config import Attention, Device, DType, EngineConfig
from staged_pool.stages.errors import ConfigError, StagedPoolError

Backend: TypeAlias = Literal["asyncio", "trio"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogFormat: TypeAlias = Literal["auto", "text", "json"]

EXIT_FAILED: Final = 1
EXIT_CONFIG: Final = 2

_DEFAULT = EngineConfig()
_SERVER = ServerConfig()

main = typer.Typer(
    help="Text embeddings through four explicit, bounded stages: parse, preprocess, batch, postprocess.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": 110},
)


def _flag(name: str, panel: str, text: str) -> Any:
    """An option that can also be set in the environment, as `STAGED_POOL_` and its name."""
    variable = "STAGED_POOL_" + name.split("/", maxsplit=1)[0].removeprefix("--").replace("-", "_").upper()
    return typer.Option(name, envvar=variable, rich_help_panel=panel, help=text)


Model = Annotated[
    str | None,
    _flag("--model", "Model", "Folder, or hub id. Default: the installed first-run model, else all-MiniLM-L6-v2."),
]
Revision = Annotated[
    str | None, _flag("--revision", "Model", "Branch, tag or commit of a hub id. Pin it, or an update changes vectors.")
]
Offline = Annotated[
    bool, _flag("--offline", "Model", "Never ask the hub: start from the local cache or fail. Faster starts.")
]
DeviceFlag = Annotated[
    Device, _flag("--device", "Device", "Where the forward runs. auto: the first CUDA device, else the CPU.")
]
DTypeFlag = Annotated[
    DType,
    _flag(
        "--dtype",
        "Device",
        "Of the weights. auto: bfloat16 where the device computes in it natively. bfloat16 is up to three times as "
        "fast, with cosines to float32 above 0.9998.",
    ),
]
AttentionFlag = Annotated[
    Attention,
    _flag(
        "--attention", "Device", "packed computes no padding; padded suits any model. auto: packed where it is right."
    ),
]
Matryoshka = Annotated[
    bool | None,
    _flag(
        "--matryoshka/--no-matryoshka",
        "Model",
        "Whether vectors may be cut to fewer dimensions. Default: where the folder says that the model was trained for "
        "it.",
    ),
]
SplitLongInputs = Annotated[
    bool,
    _flag(
        "--split-long-inputs",
        "Model",
        "Cut a text that is too long into parts and give the mean of their vectors, instead of refusing it.",
    ),
]
TorchThreads = Annotated[
    int | None,
    _flag(
        "--torch-threads",
        "Device",
        "Threads of one forward on the CPU. Default: every core. Fewer leave cores to preprocessing; more than there "
        "are cores slow everything down.",
    ),
]
LogLevelFlag = Annotated[LogLevel, _flag("--log-level", "Logs", "The least that is logged. debug includes probes.")]
LogFormatFlag = Annotated[
    LogFormat, _flag("--log-format", "Logs", "auto: text on a terminal, else one JSON object a line. To stderr.")
]
BackendFlag = Annotated[
    Backend,
    _flag("--backend", "Server", "Event loop. asyncio uses uvloop where it is installed, and is the faster one."),
]


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
        str, _flag("--host", "Server", "Address to listen on. 0.0.0.0 serves other machines too.")
    ] = _SERVER.host,
    port: Annotated[int, _flag("--port", "Server", "TCP port. 0: any free one; the log says which.")] = _SERVER.port,
    backend: BackendFlag = "asyncio",
    model: Model = None,
    revision: Revision = None,
    offline: Offline = False,
    served_name: Annotated[
        str | None,
        _flag("--served-name", "Model", "What requests and answers call the model. Default: the folder's last part."),
    ] = None,
    device: DeviceFlag = _DEFAULT.device,
    dtype: DTypeFlag = _DEFAULT.dtype,
    attention: AttentionFlag = _DEFAULT.attention,
    matryoshka: Matryoshka = None,
    split_long_inputs: SplitLongInputs = False,
    torch_threads: TorchThreads = None,
    preprocess_limit: Annotated[
        int,
        _flag(
            "--preprocess-limit",
            "Limits",
            "Preprocess calls at once, each in a thread. More help slow inputs to overtake each other, until the "
            "threads take the device's cores away.",
        ),
    ] = _DEFAULT.preprocess_limit,
    max_batch_tokens: Annotated[
        int,
        _flag(
            "--max-batch-tokens",
            "Limits",
            "Tokens of one batch. More keep a GPU busier; each batch takes longer, and a CPU becomes slower.",
        ),
    ] = _DEFAULT.max_batch_tokens,
    max_batch_items: Annotated[
        int, _flag("--max-batch-items", "Limits", "Items of one batch. Bounds a batch of very short texts.")
    ] = _DEFAULT.max_batch_items,
    max_requests: Annotated[
        int,
        _flag(
            "--max-requests",
            "Limits",
            "Requests inside at once; one more is refused with 429. More let the wait under load grow longer.",
        ),
    ] = _DEFAULT.max_requests,
    max_items: Annotated[
        int,
        _flag(
            "--max-items",
            "Limits",
            "Items inside at once, over all requests; a request beyond that is refused with 429.",
        ),
    ] = _DEFAULT.max_items,
    body_limit_mb: Annotated[
        float, _flag("--body-limit-mb", "Limits", "One request's body in MiB; a larger one is answered 413.")
    ] = _SERVER.body_limit_bytes / 2**20,
    body_timeout: Annotated[
        float,
        _flag(
            "--body-timeout",
            "Limits",
            "Seconds that a body may take to arrive; then 408. Longer lets slow clients hold memory longer.",
        ),
    ] = _SERVER.body_timeout_s,
    write_timeout: Annotated[
        float,
        _flag(
            "--write-timeout",
            "Limits",
            "Seconds that a client may take to read 64 KiB of its answer; then its connection is reset.",
        ),
    ] = _SERVER.write_timeout_s,
    max_connections: Annotated[
        int,
        _flag("--max-connections", "Limits", "Connections at once; one more is closed as soon as it comes."),
    ] = _SERVER.max_connections,
    max_http_requests: Annotated[
        int,
        _flag(
            "--max-http-requests",
            "Limits",
            "HTTP requests being handled at once, over all connections; one more is answered 503.",
        ),
    ] = _SERVER.max_http_requests,
    target_delay: Annotated[
        float,
        _flag(
            "--target-delay",
            "Limits",
            "Seconds; a request that would wait longer for its answer is refused with 429. Shorter keeps every "
            "accepted request quick, and refuses more of a burst.",
        ),
    ] = _DEFAULT.target_delay_s,
    drain_timeout: Annotated[
        float,
        _flag(
            "--drain-timeout",
            "Limits",
            "Seconds to finish what is inside after SIGTERM; the rest fails with 503. Keep it below what the "
            "supervisor allows.",
        ),
    ] = _DEFAULT.drain_timeout_s,
    log_level: LogLevelFlag = "info",
    log_format: LogFormatFlag = "auto",
) -> None:
    """Serve a model over HTTP: POST /v1/embeddings and /tokenize; GET /health, /ready, /metrics, /stages."""
    with _errors_in_flag_words():
        body_limit_bytes = _mebibytes("body_limit_mb", body_limit_mb)
        server = ServerConfig(
            host=host,
            port=port,
            body_limit_bytes=body_limit_bytes,
            bodies_limit_bytes=max(_SERVER.bodies_limit_bytes, 4 * body_limit_bytes),
            body_timeout_s=body_timeout,
            write_timeout_s=write_timeout,
            max_connections=max_connections,
            max_http_requests=max_http_requests,
        )
        engine = EngineConfig(
            model=model,
            revision=revision,
            offline=offline,
            served_name=served_name,
            matryoshka=matryoshka,
            split_long_inputs=split_long_inputs,
            device=device,
            dtype=dtype,
            attention=attention,
            torch_threads=torch_threads,
            preprocess_limit=preprocess_limit,
            max_batch_tokens=max_batch_tokens,
            max_batch_items=max_batch_items,
            max_requests=max_requests,
            max_items=max_items,
            target_delay_s=target_delay,
            drain_timeout_s=drain_timeout,
        )
        listener = bind(server.host, server.port)
        _prepare_environment(offline=offline)

        from staged_pool.api import logs
        from staged_pool.api.server import serve as run_server

        logs.configure(log_level, log_format)
        _run(backend, lambda: run_server(server, engine, listener))


@main.command()
def embed(
    *,
    texts: Annotated[
        list[str] | None, typer.Argument(help="The texts. Without any: one text a line from the standard input.")
    ] = None,
    dimensions: Annotated[
        int | None,
        _flag("--dimensions", "Vectors", "Keep the first so many values. Only Matryoshka models lose little by it."),
    ] = None,
    backend: BackendFlag = "asyncio",
    model: Model = None,
    revision: Revision = None,
    offline: Offline = False,
    device: DeviceFlag = _DEFAULT.device,
    dtype: DTypeFlag = _DEFAULT.dtype,
    attention: AttentionFlag = _DEFAULT.attention,
    matryoshka: Matryoshka = None,
    split_long_inputs: SplitLongInputs = False,
    torch_threads: TorchThreads = None,
    log_level: LogLevelFlag = "warning",
    log_format: LogFormatFlag = "auto",
) -> None:
    """Embed texts without a server. Prints one JSON object a text: {"index", "text", "embedding"}."""
    with _errors_in_flag_words():
        config = EngineConfig(
            model=model,
            revision=revision,
            offline=offline,
            device=device,
            dtype=dtype,
            attention=attention,
            matryoshka=matryoshka,
            split_long_inputs=split_long_inputs,
            torch_threads=torch_threads,
        )
        _prepare_environment(offline=offline)

        from staged_pool.api import logs

        logs.configure(log_level, log_format)
        sources = texts or [line.rstrip("\n") for line in sys.stdin]
        _run(backend, lambda: _embed(config, sources, dimensions))


@main.command()
def check(
    *,
    folder: Annotated[str, typer.Argument(help="The model: a folder, or a hub id.")],
    revision: Revision = None,
    offline: Offline = False,
    device: DeviceFlag = _DEFAULT.device,
    dtype: DTypeFlag = _DEFAULT.dtype,
    attention: AttentionFlag = _DEFAULT.attention,
    log_level: LogLevelFlag = "warning",
    log_format: LogFormatFlag = "auto",
) -> None:
    """Read, load and run a model without serving it. Prints what was understood of it as one JSON object, or says in
    one line why it cannot be served (exit code 2)."""
    with _errors_in_flag_words():
        config = EngineConfig(
            model=folder, revision=revision, offline=offline, device=device, dtype=dtype, attention=attention
        )
        _prepare_environment(offline=offline)

        from staged_pool.api import logs
        from staged_pool.runtime.models.load import load_model

        logs.configure(log_level, log_format)
        typer.echo(json.dumps(dataclasses.asdict(load_model(config).card), ensure_ascii=False))


async def _embed(config: EngineConfig, texts: list[str], dimensions: int | None) -> None:
    from staged_pool.runtime.engine import open_engine

    async with open_engine(config) as engine:
        for first in range(0, len(texts), config.max_request_items):
            result = await engine.embed(texts[first : first + config.max_request_items], dimensions=dimensions)
            for index, vector in enumerate(result.embeddings.tolist(), start=first):
                sys.stdout.write(json.dumps({"index": index, "text": texts[index], "embedding": vector}) + "\n")


def _prepare_environment(*, offline: bool) -> None:
    """Settle what libraries read from the environment when they are imported. What the user has set stays."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle torch threads must not spin on preprocess's cores
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # preprocess has its own threads
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # of kernels, a few hundred KB each
        os.environ.setdefault(cache, "256")  # the sizes of packed batches fit; padded ones have no end of sizes
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"


def _run(backend: Backend, program: Callable[[], Awaitable[None]]) -> None:
    import anyio

    uvloop = backend == "asyncio" and importlib.util.find_spec("uvloop") is not None
    anyio.run(program, backend=backend, backend_options={"use_uvloop": True} if uvloop else {})


@contextmanager
def _errors_in_flag_words() -> Iterator[None]:
    """End the process with one line for an error that the user can do something about."""
    try:
        yield
    except ConfigError as error:
        _exit(_in_flag_words(str(error)), EXIT_CONFIG)
    except StagedPoolError as error:
        _exit(str(error), EXIT_FAILED)


def _exit(message: str, code: int) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)


def _mebibytes(name: str, value: float) -> int:
    if not 0.001 <= value <= 2048:
        raise ConfigError(f"{name}={value:g}: must be between 0.001 and 2048")
    return int(value * 2**20)


def _in_flag_words(message: str) -> str:
    """`preprocess_limit=0: must be ...` becomes `--preprocess-limit 0: must be ...`."""
    field = re.match(r"(\w+)=", message)
    if field is None:
        return message
    name = field[1].removesuffix("_s").replace("_", "-")
    return f"--{name} {message[field.end() :]}"
