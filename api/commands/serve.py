"""The command `serve`: bind the socket, then import the heavy modules and serve.

The socket listens before the heavy imports, so that an early client waits for an answer instead of failing to connect.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from staged_pool.api.commands.fleet import check_fleet, supervise
from staged_pool.api.commands.given import (
    Given,
    build_server,
    config_file,
    config_option,
    given_models,
    given_settings,
)
from staged_pool.api.commands.options import SettingOption, SettingsCommand, setting_options
from staged_pool.api.commands.pipeline_models import with_models_of
from staged_pool.api.commands.process import errors_in_flag_words, prepare_environment, run
from staged_pool.api.commands.process_config import ProcessConfig
from staged_pool.api.commands.table import CONFIGS
from staged_pool.api.commands.variables import log_unknown
from staged_pool.api.config import ServerConfig
from staged_pool.api.http.listener import bind, bind_udp, bind_unix
from staged_pool.api.http.tls import server_context
from staged_pool.runtime.config import OF_ONE_MODEL, EngineConfig
from staged_pool.runtime.machine.signals import note_end_signals

if TYPE_CHECKING:
    from staged_pool.runtime.pipelines.file import PipelineFile  # imported when there is one


def serve_options() -> list[click.Parameter]:
    """Make the flags of `serve`: `--config`, and all settings that have a flag."""
    options = [config_option(), *(option for config in CONFIGS for option in setting_options(config))]
    return [
        SettingOption(option.row, multiple=True)
        if isinstance(option, SettingOption) and option.row.name == "model"
        else option
        for option in options
    ]


def build_engines(models: Sequence[Given]) -> list[EngineConfig]:
    """Make the configuration of each engine, and check its model.

    Downloads nothing: a hub id is looked up in the local cache at most.

    Raises:
        ConfigError: A setting or a model is wrong.
    """
    from staged_pool.runtime.models.find import check_model
    from staged_pool.runtime.plugins.find import find_plugin

    engines = [given.build(EngineConfig) for given in models]
    for given, engine in zip(models, engines, strict=True):
        with given.errors_by_source():
            check_model(engine)
            for name in engine.plugin:
                find_plugin(name)
    return engines


def _serve(**_: Any) -> None:
    note_end_signals()
    ctx = click.get_current_context()
    with errors_in_flag_words():
        given = given_settings(ctx)
        process, server = given.build(ProcessConfig), build_server(given)
        pipelines = _read_pipelines(process)
        models = with_models_of(pipelines, given_models(given, config_file(ctx)))
        engines = build_engines(models)
        # Errors of a single model name its line in the file, also those that loading it finds.
        base = Given(
            values={name: value for name, value in given.values.items() if name not in OF_ONE_MODEL},
            sources=given.sources,
        ).build(EngineConfig)
        with (models[0] if len(models) == 1 else given).errors_by_source():
            _run(process, server, engines, pipelines, base)


def _read_pipelines(process: ProcessConfig) -> Sequence[PipelineFile]:
    if not process.pipeline:
        return ()
    from staged_pool.runtime.pipelines.file import read_pipelines

    return read_pipelines(process.pipeline)


def _run(
    process: ProcessConfig,
    server: ServerConfig,
    engines: list[EngineConfig],
    pipelines: Sequence[PipelineFile],
    base: EngineConfig,
) -> None:
    server_context(server)  # before anything heavy: its files may be wrong
    if server.trace_endpoint is not None:
        from staged_pool.api.tracing.opening import check_installed as check_traces

        check_traces(server.trace_endpoint)
    if process.api_servers:
        _run_fleet(process, server, engines, pipelines)
        return
    listener = _listener(server)
    if server.quic_port is not None:
        from staged_pool.api.http.http3.protocol import check_installed

        check_installed()
    quic_listener = None if server.quic_port is None else bind_udp(server.host, server.quic_port)
    prepare_environment(offline=any(engine.offline for engine in engines))

    from staged_pool.api.commands import logs
    from staged_pool.api.commands.load_line import LoadLine
    from staged_pool.api.http.server import serve as run_server
    from staged_pool.runtime.load_progress import LoadProgress, reporting_loads

    logs.configure(process.log_level, process.log_format)
    log_unknown(click.get_current_context().find_root().command)
    show = None if process.log_format == "json" else logs.status_line()
    progress = LoadProgress() if show is None else LoadProgress(LoadLine(show))

    async def program() -> None:
        with reporting_loads(progress):
            await run_server(server, engines, listener, quic_listener, pipelines, base=base)

    run(process.backend, program)


def _run_fleet(
    process: ProcessConfig, server: ServerConfig, engines: list[EngineConfig], pipelines: Sequence[PipelineFile]
) -> None:
    """Run fronts, an engine process, and the supervisor over them in this process."""
    from staged_pool.api.commands import logs

    check_fleet(process.api_servers, server, engines)
    listener = _listener(server)
    logs.configure(process.log_level, process.log_format, process="supervisor")
    log_unknown(click.get_current_context().find_root().command)
    if code := supervise(process, server, engines, pipelines, listener):
        raise click.exceptions.Exit(code)


def _listener(server: ServerConfig) -> socket.socket:
    return bind(server.host, server.port) if server.unix_socket is None else bind_unix(server.unix_socket)


serve: Final = SettingsCommand(
    "serve",
    callback=_serve,
    params=serve_options(),
    help="""Serve a model over HTTP.

    Routes: POST /v1/embeddings, /pooling, /score, /rerank, /classify, /classify_tokens, /tokenize, /detokenize,
    /pipelines/NAME; GET /v1/models, /version, /health, /ready, /load, /metrics, /stages,
    /pipelines.
    """,
)
